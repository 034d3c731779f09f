"""What a common state may name: the very list, so that nothing is let in by the way.

A new name needs a line here. It must be inert (a stand-in, a plain container), and something that a
stock megatron-core writes; say which in the commit.
"""

from __future__ import annotations

from vime_optim.files import safe_load

OPTIMIZERS = {
    "apex.optimizers.fused_adam.FusedAdam",
    "apex.optimizers.fused_sgd.FusedSGD",
    "torch.optim.adam.Adam",
    "torch.optim.adamw.AdamW",
    "torch.optim.sgd.SGD",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD",
}
MEGATRON = {
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnType",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.ModelType",
}
PYTHON = {
    "_codecs.encode",
    "_io.BytesIO",
    "argparse.Namespace",
    "builtins.frozenset",
    "builtins.set",
    "collections.Counter",
    "collections.OrderedDict",
    "signal.Signals",
    "types.SimpleNamespace",
    *(
        f"{module}.{name}"
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    ),
}
NUMPY = {
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
}
TORCH = {
    "torch.Size",
    "torch._C.Generator",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch.device",
    "torch.serialization._get_layout",
    "torch.storage.UntypedStorage",
}


def is_dtype_or_storage(name: str) -> bool:
    """torch.float32 and torch.FloatStorage, of which each release of torch has some more."""
    import torch

    module, _, attribute = name.rpartition(".")
    if module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype):
        return True
    return module in ("torch", "torch.cuda", "torch.storage") and attribute.endswith("Storage")


def test_the_list_is_this_one() -> None:
    fixed = {name for name in safe_load._ALLOWED_NAMES if not is_dtype_or_storage(name)}
    expected = OPTIMIZERS | MEGATRON | PYTHON | NUMPY | TORCH - {"torch.storage.UntypedStorage"}
    assert fixed == expected


def test_what_stands_for_a_name_runs_nothing() -> None:
    """By what each entry builds: a stand-in, a plain container, a path, or one of our own few."""
    ours = {"_never_call", "_new_generator", "_reconstruct_array", "numpy_scalar"}
    containers = {"Namespace", "SimpleNamespace", "BytesIO", "Signals", "frozenset"}
    paths = {"PosixPath", "PurePosixPath", "PureWindowsPath"}
    values = {"NumpyDtype", "NumpyArray"}
    for built, name in safe_load._ALLOWED:
        if name in OPTIMIZERS | MEGATRON:
            assert safe_load.is_inert_class(built), name
            assert built.dotted_name == name
        else:
            assert built.__name__ in ours | containers | paths | values, name


def test_torchs_own_list_is_back_after_a_load() -> None:
    import io

    import torch

    class Users:
        """Something that a program registered before."""

    torch.serialization.add_safe_globals([Users])
    before = list(torch.serialization.get_safe_globals())
    stream = io.BytesIO()
    torch.save({"iteration": 3}, stream)
    try:
        assert safe_load.load_common(stream.getvalue()) == {"iteration": 3}
        assert set(torch.serialization.get_safe_globals()) == set(before)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([g for g in before if g is not Users])
