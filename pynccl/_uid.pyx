"""Unique ids, and the libraries that make them."""

from libc.string cimport memcmp, memset

from pynccl._nccl cimport (
    Library,
    PYNCCL_HOST_ID_MAGIC,
    PYNCCL_HOST_ID_MAGIC_BYTES,
    PYNCCL_HOST_ID_OFFSET,
    failure,
    load,
    ncclResult_t,
    ncclSuccess,
    ncclUniqueId,
)

UNIQUE_ID_BYTES = 128


class UniqueId(bytes):
    """The 128 bytes that name one communicator to be; made by `unique_id` on one rank.

    They may travel as any bytes do: pickled, through a store, in a file.  An id serves one creation.

    Parameters
    ----------
    raw : bytes-like
        Exactly 128 bytes.

    Raises
    ------
    TypeError
        `raw` is not bytes-like.
    ValueError
        The length is wrong.
    """

    __slots__ = ()

    def __new__(cls, raw):
        if not isinstance(raw, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"a unique id must be bytes, as unique_id() returns them, not {type(raw).__name__!r}"
            )
        raw = bytes(raw)
        if len(raw) != UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id has {UNIQUE_ID_BYTES} bytes, not {len(raw)}")
        return super().__new__(cls, raw)

    def __reduce__(self):
        return UniqueId, (bytes(self),)

    @property
    def kind(self):
        """Which library made the id: "host" or "nccl"."""
        return "host" if _made_by_host(self) else "nccl"

    def __repr__(self):
        return f"<UniqueId {self.kind} {self[:8].hex()}…>"

    __str__ = __repr__


cdef bint _made_by_host(object uid) except -1:
    cdef const char *raw = uid
    return memcmp(raw + PYNCCL_HOST_ID_OFFSET, PYNCCL_HOST_ID_MAGIC, PYNCCL_HOST_ID_MAGIC_BYTES) == 0


def unique_id(library="auto"):
    """Make the id for one new communicator; call it on one rank and share the result.

    Parameters
    ----------
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library that the communicator will use.

    Returns
    -------
    UniqueId
        128 bytes.

    Raises
    ------
    LibraryNotFoundError
        No such library could be loaded.
    NCCLError
        The library reported a failure.

    Notes
    -----
    C function: ``ncclGetUniqueId``, NCCL 2.0.  On NCCL the process that called it must live until
    the communicator is there.

    Examples
    --------
    >>> import pynccl
    >>> len(pynccl.unique_id("host"))
    128
    """
    cdef Library lib = load(library)
    cdef ncclUniqueId uid
    cdef ncclResult_t result
    memset(&uid, 0, sizeof(uid))
    with nogil:
        result = lib.api.ncclGetUniqueId(&uid)
    if result != ncclSuccess:
        raise failure(result, b"ncclGetUniqueId", lib.api, NULL, None)
    return UniqueId(uid.internal[:UNIQUE_ID_BYTES])


def library(name="auto"):
    """Load a library, or say which one is loaded.

    Parameters
    ----------
    name : {"auto", "nccl", "host"} or path, default: "auto"
        As everywhere.

    Returns
    -------
    Library
        With its ``path``, ``kind``, ``version`` and ``missing`` functions.

    Raises
    ------
    LibraryNotFoundError
        No such library could be loaded.

    Examples
    --------
    >>> import pynccl
    >>> pynccl.library("host").kind
    'host'
    """
    return load(name)


def version_code(library="auto"):
    """Return the library's version as NCCL codes it: 23203 is 2.32.3.

    Parameters
    ----------
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library to ask.

    Returns
    -------
    int
        The code.

    Raises
    ------
    LibraryNotFoundError
        No such library could be loaded.

    Notes
    -----
    C function: ``ncclGetVersion``, NCCL 2.0.

    Examples
    --------
    >>> import pynccl
    >>> pynccl.version_code("host") >= 23200
    True
    """
    return load(library).version
