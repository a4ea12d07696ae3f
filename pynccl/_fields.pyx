"""Numbers, flags and texts that C will read, checked; and values with named fields, as `Config` is one."""

import operator


cdef object integer(str name, object value, object low=-2**31, object high=2**31 - 1, str room="32 bits"):
    """An int-like value as an int in a range, which messages call `room`."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not a bool")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__!r}") from None
    if not low <= value <= high:
        raise ValueError(f"{name} {value} does not fit in {room}")
    return value


cdef bint flag(str name, object value) except -1:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


cdef bytes text(str name, object value):
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__!r}")
    if "\0" in value:
        raise ValueError(f"{name} holds a null character")
    return value.encode()


cdef class Fields:
    """A value made of the fields that were given; one that was not reads None."""

    NAMES = ()

    def __getattr__(self, name):
        if name in self.NAMES:
            return self.values.get(name)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __eq__(self, other):
        return self.values == (<Fields>other).values if type(other) is type(self) else NotImplemented

    def __hash__(self):
        return hash(frozenset(self.values.items()))

    def __repr__(self):
        fields = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"{type(self).__name__}({fields})"

    def __reduce__(self):
        return _again, (type(self), self.values)


def _again(kind, values):
    return kind(**values)
