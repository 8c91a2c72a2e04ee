"""The end of a rank's process, as of any Python program: threads, exit handlers, `__del__`, buffers of open files.

Python's own way out is not taken. After an error it would wait for threads that wait for dead peers, and after a good
run gloo's threads now and then abort the interpreter on its way. So its parts that a program can see are done here, and
`os._exit` follows. Imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import sysconfig
import threading
import time
import traceback
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages")  # in the paths of others' modules
THREADS_GRACE = 1.0  # seconds for the threads of a program that has failed: they may wait for dead peers


def run_exit_handlers(after_error: bool = False) -> None:
    """Wait for threads and call `atexit` handlers."""
    if after_error:
        deadline = time.monotonic() + THREADS_GRACE
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
    else:
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does at the end of a process
    atexit._run_exitfuncs()


@contextlib.contextmanager
def end_forked_processes() -> Iterator[None]:
    """End a process that the block has forked where the block ends, as Python ends it: that one is no rank."""
    rank = os.getpid()
    code = 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == rank:
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    if os.getpid() != rank:
        with contextlib.suppress(Exception):
            run_exit_handlers()
            release_program()
        os._exit(code & 0xFF)


def release_program() -> None:
    """Drop the program's modules, which calls `__del__` of what only they hold, and write what open files hold back."""
    threading.excepthook = lambda details: None  # daemon threads that run on find modules without contents
    _flush_files(is_last=False)  # the collection may finalize a file before the buffer that writes to it
    names = [
        name
        for name, module in sys.modules.items()
        if isinstance(module, types.ModuleType) and is_of_program(vars(module))
    ]
    modules = [weakref.ref(sys.modules.pop(name)) for name in names]
    gc.collect()  # `__del__` still finds the names of its module
    for module in modules:
        _clear(module())  # if something else refers to it
    gc.collect()
    _flush_files(is_last=True)


def _clear(module: types.ModuleType | None) -> None:
    for name in [name for name in vars(module) if name != "__builtins__"] if module else ():
        setattr(module, name, None)


def _flush_files(is_last: bool) -> None:
    """Write what open files hold back, from the text to the disk; what is in between, as gzip, is closed at last."""
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    files.sort(key=lambda each: (not issubclass(type(each), io.TextIOWrapper), type(each).__module__ == "_io"))
    for file in files:
        with contextlib.suppress(Exception):  # it is closed, or whoever read it is gone
            if type(file).__module__ == "_io":
                file.flush()
            elif is_last:
                file.close()


def frames_of_user(error: BaseException | types.TracebackType) -> types.TracebackType | None:
    """Return a traceback, or that of an error, from the first frame of the user's own code on; None if there is none.

    What comes before that, such as the training loop and torch's modules, is the same for every error in a recipe.
    """
    frames = error.__traceback__ if isinstance(error, BaseException) else error
    while frames and not is_of_program(frames.tb_frame.f_globals):
        frames = frames.tb_next
    return frames


def is_of_program(module: Mapping[str, Any]) -> bool:
    """Return whether a module with this dictionary is the main one, or neither of this package nor installed."""
    name, file = module.get("__name__"), module.get("__file__")
    if name == "__main__":
        return True
    is_ours = isinstance(name, str) and name.partition(".")[0] == __name__.partition(".")[0]
    return isinstance(file, str) and not is_ours and not any(part in file for part in LIBRARIES)
