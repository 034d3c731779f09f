"""Every setting of vime_optim: its argument, environment variable, unit and default.

An argument to install() wins over the environment, the environment over the default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vime_optim.errors import SettingsError

PREFIX = "VIME_OPTIM_"

#: Variables of that prefix that are no settings of install(): tools, tests and ranks read them.
_OTHERS = "BENCH_RATE_FILE CACHE_DIR MATRIX_RESULTS MEGATRON_DIR MEGATRON_TREES REPOSITORY REQUIRE"
OTHER_VARIABLES = frozenset(PREFIX + name for name in [*_OTHERS.split(), "SIMULATE"])
#: And all that begin so.
OTHER_PREFIXES = (PREFIX + "TEST_", PREFIX + "GPU_")

_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False, "": False}


def _flag(text: str) -> bool:
    try:
        return _WORDS[text.strip().lower()]
    except KeyError:
        raise ValueError("one of 1/0, true/false, yes/no, on/off") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("a whole number, at least 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("a number of seconds greater than 0")
    return value


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return text

    return parse


def _verify(text: str) -> str:
    """It was a flag once."""
    try:
        return "all" if _flag(text) else "off"
    except ValueError:
        return _choice("read", "all", "off")(text)


def _setting(name: str, parse: Callable[[str], Any], default: Any, doc: str) -> Any:
    return field(default=default, metadata={"env": PREFIX + name, "parse": parse, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """Values in force. Build with `Settings.load`."""

    skip: tuple[str, ...] = _setting(
        "SKIP", _names, (), "comma-separated fix or fault ids that stay off"
    )
    only: tuple[str, ...] = _setting(
        "ONLY", _names, (), "comma-separated fix or fault ids; all others stay off"
    )
    strict: bool = _setting("STRICT", _flag, False, "raise when a fix's target is not understood")
    sharding: str = _setting(
        "SHARDING",
        _choice("enforce", "error", "off"),
        "enforce",
        "what to do when a save with PAO and CPU offload asks for another type than"
        " fully_reshardable: enforce | error | off",
    )
    verify: str = _setting(
        "VERIFY",
        _verify,
        "off",
        "whether a load compares files with their digests: off, or 0 | read (what was read, at the"
        " end of the load, shared by the ranks, which takes 1.4 times a load from memory on two"
        " cores) | all, or"
        " 1 (every byte before anything is changed, which reads the files once more, shared by the"
        " ranks, 1.25 times the load itself; refused without a manifest)",
    )
    async_mode: str = _setting(
        "ASYNC",
        _choice("guard", "stage", "off"),
        "guard",
        "how an async save stays exact: guard (an update copies, or waits for, what it changes)"
        " | stage (all is copied at the call) | off (Megatron's own writers)",
    )
    stage_bytes: int = _setting(
        "STAGE_BYTES",
        _count,
        8 << 30,
        "host memory, in bytes, that copies for the async saves of one rank may use",
    )
    writer_timeout_s: float = _setting(
        "WRITER_TIMEOUT_S",
        _seconds,
        600.0,
        "seconds in which the writers of a save get nothing done before it is given up",
    )
    verbose: bool = _setting(
        "VERBOSE",
        _flag,
        False,
        "rank 0 says on stderr what install() did, also where no logging is set up",
    )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
        """Settings from the environment and from arguments, which win.

        Raises:
            SettingsError: an unknown argument, a value that cannot be read, or a VIME_OPTIM_
                variable that looks like a misspelt setting.
        """
        env = os.environ if environ is None else environ
        _refuse_misspelt(env)
        known = {f.name: f for f in fields(cls)}
        for name in arguments:
            if name not in known:
                raise SettingsError(
                    f"unknown setting {name!r}",
                    expected=", ".join(sorted(known)),
                    next_step="see vime_optim/settings.py for what each one means",
                )
        values: dict[str, Any] = {}
        for name, spec in known.items():
            text = env.get(spec.metadata["env"])
            if arguments.get(name) is not None:
                values[name] = _parse(spec.metadata, name, arguments[name])
            elif text is not None:
                values[name] = _parse(spec.metadata, spec.metadata["env"], text)
        return replace(cls(), **values)


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of our prefix that nothing here reads, with the setting that each looks like or ''.

    A launcher may have variables of that prefix for its own use: only a likeness is an error.
    """
    known = {f.metadata["env"] for f in fields(Settings)}
    spellings = {env.removeprefix(PREFIX): env for env in known}
    spellings.update((f.name.upper(), f.metadata["env"]) for f in fields(Settings))
    found = {}
    for name in sorted(environ):
        other = name in OTHER_VARIABLES or name.startswith(OTHER_PREFIXES)
        if name.upper().startswith(PREFIX) and name not in known and not other:
            bare = name.upper().removeprefix(PREFIX)
            near = difflib.get_close_matches(bare, spellings, 1, 0.6)
            found[name] = spellings[near[0]] if near else ""
    return found


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    meant = {name: near for name, near in unknown_variables(environ).items() if near}
    if meant:
        raise SettingsError(
            "environment variables look like settings of vime_optim, but are none",
            got=", ".join(meant),
            expected=", ".join(sorted(set(meant.values()))),
            next_step=f"correct or unset {', '.join(meant)}; nothing was changed",
        )


def _parse(meta: Mapping[str, Any], where: str, value: Any) -> Any:
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(str(item) for item in value)
    try:
        return meta["parse"](str(value))
    except ValueError as error:
        raise SettingsError(
            "a setting has a value that cannot be read",
            where=where,
            got=repr(str(value)),
            expected=str(error),
            next_step=f"unset {where} or give it a valid value",
        ) from None


_current = Settings()


def current() -> Settings:
    """The settings of the running installation (defaults before install())."""
    return _current


def activate(settings: Settings) -> None:
    """Make `settings` the ones that fixes read. Called by install() alone."""
    global _current
    _current = settings
