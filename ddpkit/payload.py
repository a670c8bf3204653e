"""Functions and values on their way between a notebook and its ranks.

Built on cloudpickle, which pickles what was typed into a cell by value. Added here:

- *One `__main__`.* What cells defined lands in the rank's own `__main__`, and functions look their globals up there, as they would in a
  script. So `torch.save` of a cell's class works in a rank, and so does a cell's Dataset on its way to a DataLoader worker.
- *Identity on the way back.* A class or function that the notebook has sent comes back as the notebook's own object, so `isinstance` holds.
  cloudpickle alone finds the class again too, but then sets all its attributes to the rank's: a rank would change the notebook's class.
- *Names in errors.* Where something cannot be pickled, the error says which variable of which function it is.

Tensors travel as plain bytes (as in `torch.save`), never as a handle to shared memory: the handle needs its maker alive, takes a file
descriptor each, and would let one rank write into another's weights.
"""

from __future__ import annotations

import io
import itertools
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle

_numbers = itertools.count(1)
_sent: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""In the notebook: the classes and functions that went to ranks, by number. Weak: a cell that is run again replaces its class."""
_number_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The same the other way round; in a rank, of those that came from the notebook."""


class NotPicklable(TypeError):
    """Something that was to go to another process cannot be pickled. The message names it."""


class _MainNamespace(dict[str, Any]):
    """Stands in a pickle for `__main__.__dict__`: unpickled, it is the other process's own."""

    def __reduce__(self) -> tuple[Callable[[], dict[str, Any]], tuple[()]]:
        return _main_namespace, ()


def _main_namespace() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _is_from_main(thing: Any) -> bool:
    return isinstance(thing, (type, types.FunctionType)) and getattr(thing, "__module__", None) == "__main__"


def _make_code(filename: str, make: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    return make(*args).replace(co_filename=filename)


def _recall(number: int) -> Any:
    """In the notebook: the very object that was sent under this number."""
    return _sent[number]


class _ToRank(cloudpickle.Pickler):
    """Pickles in the notebook, for a rank."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.from_main: dict[int, Any] = {}
        # cloudpickle keeps here which dict becomes the globals of a function that it pickles; one per dict of the sender.
        self.globals_ref[id(_main_namespace())] = _MainNamespace()

    def reducer_override(self, obj: Any) -> Any:
        if _is_from_main(obj):
            number = _number_of.get(obj)
            if number is None:
                number = _number_of[obj] = next(_numbers)
                _sent[number] = obj
            self.from_main[number] = obj
        if isinstance(obj, types.CodeType):
            # cloudpickle leaves out the file name, and tracebacks would lose the cell that a line is in.
            make, *rest = self.dispatch_table[types.CodeType](obj)
            return _make_code, (obj.co_filename, make, *rest)
        return super().reducer_override(obj)


class _ToNotebook(cloudpickle.Pickler):
    """Pickles in a rank, for the notebook."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            number = _number_of.get(obj)
            if number is not None:
                return _recall, (number,)
        return super().reducer_override(obj)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A function and its arguments for a rank. Raises NotPicklable, naming what cannot travel."""
    file = io.BytesIO()
    pickler = _ToRank(file)
    try:
        pickler.dump((fn, args))
        pickler.dump(pickler.from_main)  # the same pickler: what the first pickle holds is not pickled again, and stays the same object
    except RecursionError as error:
        raise NotPicklable(f"{_name_of(fn)} or its arguments are nested too deeply to be sent to a rank.") from error
    except Exception as error:  # pickling runs __reduce__ and __getstate__ of any class
        raise NotPicklable(_explain(fn, args, error)) from error
    return file.getvalue()


def unpack_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """In a rank: the function and its arguments. Fills the rank's `__main__` with what the notebook's cells defined for it."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    fn, args = unpickler.load()
    main = _main_namespace()
    for number, thing in unpickler.load().items():
        _number_of[thing] = number
        if "<locals>" not in thing.__qualname__ and "." not in thing.__qualname__:
            main.setdefault(thing.__name__, thing)
    return fn, args


def pack_value(value: Any) -> bytes:
    """In a rank: a value for the notebook. Raises whatever pickling it raises."""
    file = io.BytesIO()
    _ToNotebook(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpack_value(data: bytes) -> Any:
    """In the notebook: the value that a rank sent."""
    return pickle.loads(data)


def pickle_main_by_value() -> None:
    """In a rank: let multiprocessing send what cells defined to the processes that the rank starts (DataLoader workers).

    multiprocessing pickles a class as "look it up in __main__", and a new process has nothing there. (A forked one has, and needs no pickle.)
    """
    from multiprocessing.reduction import ForkingPickler

    def reducer_override(self: Any, obj: Any) -> Any:
        if _is_from_main(obj):
            return cloudpickle.loads, (cloudpickle.dumps(obj),)
        return NotImplemented

    ForkingPickler.reducer_override = reducer_override  # type: ignore[method-assign]


def _name_of(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def _can_travel(thing: Any) -> bool:
    try:
        _ToRank(io.BytesIO()).dump(thing)
    except Exception:  # any error of any class's own pickling code means the same here: no
        return False
    return True


def _explain(fn: Callable[..., Any], args: tuple[Any, ...], error: Exception) -> str:
    """Which variable it is: look one level at a time for the part that fails alone."""
    path, culprit = _find_culprit(fn, f"the function {_name_of(fn)}", set())
    if path is None:
        for index, arg in enumerate(args):
            path, culprit = _find_culprit(arg, f"args[{index}]", set())
            if path is not None:
                break
    if path is None:
        return f"{_name_of(fn)} cannot be sent to another process: {type(error).__name__}: {error}"
    if "'get_ipython'" in path:
        return (
            f"{_name_of(fn)} uses get_ipython, as every line that begins with % or ! does. It exists in the notebook only, and a rank is a process "
            "without IPython: leave such lines out of the function."
        )
    kind = type(culprit)
    name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    return (
        f"{path} is a {name}, which cannot be sent to another process ({type(error).__name__}: {error}).\n"
        f"Each rank is a process of its own: make the {kind.__qualname__} inside {_name_of(fn)}, or pass what it is made from."
    )


def _find_culprit(thing: Any, path: str, seen: set[int]) -> tuple[str | None, Any]:
    """The path to the innermost part of `thing` that fails to pickle, and that part; (None, None) where all of it can travel."""
    if id(thing) in seen or _can_travel(thing):
        return None, None
    seen.add(id(thing))
    for name, part in _parts(thing):
        found, culprit = _find_culprit(part, name.format(path=path), seen)
        if found is not None:
            return found, culprit
    return path, thing


def _parts(thing: Any) -> list[tuple[str, Any]]:
    """What a thing holds, each with a pattern of its path."""
    if isinstance(thing, types.MethodType):
        return [("{path}, bound to an object that", thing.__self__), ("{path}", thing.__func__)]
    if isinstance(thing, types.FunctionType):
        used = [name for name in _global_names(thing.__code__) if name in thing.__globals__]
        parts = [(f"the variable {name!r}, used by {_name_of(thing)},", thing.__globals__[name]) for name in used]
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            try:
                parts.append((f"the variable {name!r}, used by {_name_of(thing)},", cell.cell_contents))
            except ValueError:
                pass  # a variable of the enclosing function that has no value yet
        return parts + [("a default argument of {path}", value) for value in thing.__defaults__ or ()]
    if isinstance(thing, dict):
        return [(f"{{path}}[{_short(key)}]", value) for key, value in thing.items()]
    if isinstance(thing, (list, tuple)):
        return [(f"{{path}}[{index}]", value) for index, value in enumerate(thing)]
    if isinstance(thing, type):
        return [(f"{thing.__qualname__}.{name}", value) for name, value in vars(thing).items() if not name.startswith("__")]
    return [(f"{{path}}.{name}", value) for name, value in getattr(thing, "__dict__", {}).items()]


def _short(key: object) -> str:
    return repr(key)[:40].replace("{", "{{").replace("}", "}}")


def _global_names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return names
