"""`import vime_optim.auto` calls `vime_optim.install()`; settings come from the environment.

For places where a framework takes the name of a module to import: VERL_USE_EXTERNAL_MODULES, a
plugin file, a worker's own module. An import does it once a process.
"""

from vime_optim import install

install()
