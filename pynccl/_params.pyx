"""What a library can be asked and told before it has a communicator: its parameters, and encryption."""

from pynccl._nccl cimport (
    Library,
    NCCL_API_MAGIC,
    NCCL_ENCRYPTION_MODE_NONE,
    NCCL_ENCRYPTION_MODE_PSK,
    NCCL_VERSION_CODE,
    failure,
    load,
    ncclEncryptionConfig_t,
    ncclResult_t,
    ncclSuccess,
)

import os

cdef int PSK_MIN_BYTES = 32

# The key that each library has now: NCCL does not say that it copies it.
cdef dict _keys = {}


def parameters(library="auto"):
    """Return the library's parameters and their present values.

    They are the variables ``NCCL_...`` as the library understands them, after its configuration files;
    which of them a release publishes is its own choice.

    Parameters
    ----------
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library to ask.

    Returns
    -------
    dict of str to str
        Value by name, in the library's order.

    Raises
    ------
    UnsupportedError
        The library is older than NCCL 2.30.
    NCCLError
        The library reported a failure.

    Notes
    -----
    C functions: ``ncclParamGetAllParameterKeys``, ``ncclParamGetParameter``, NCCL 2.30.

    Examples
    --------
    >>> import pynccl
    >>> all(name.startswith("NCCL_") for name in pynccl.parameters("host"))
    True
    """
    cdef Library lib = load(library)
    cdef const char **keys = NULL
    cdef const char *value = NULL
    cdef int count = 0, length = 0, i
    cdef ncclResult_t result
    lib.needs(b"ncclParamGetAllParameterKeys")
    with nogil:
        result = lib.api.ncclParamGetAllParameterKeys(&keys, &count)
    if result != ncclSuccess:
        raise failure(result, b"ncclParamGetAllParameterKeys", lib.api, NULL, None)
    values = {}
    for i in range(count):
        result = lib.api.ncclParamGetParameter(keys[i], &value, &length)
        if result != ncclSuccess:
            raise failure(result, b"ncclParamGetParameter", lib.api, NULL, None)
        # Paths may be among them: any bytes must come through.
        values[os.fsdecode(keys[i])] = os.fsdecode(value[:length])
    return values


def set_encryption(psk, *, library="auto"):
    """Encrypt what communicators that are created from now on send over the network.

    Parameters
    ----------
    psk : bytes or str or None
        The key that all ranks share, at least 32 bytes and none of them 0.  None: encrypt no more.
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library to tell.  The host library checks the key and has no network to encrypt.

    Raises
    ------
    TypeError, ValueError
        `psk` is not such a key; nothing was changed.
    UnsupportedError
        The library is older than NCCL 2.32.
    NCCLError
        The library reported a failure, for one because it was built without encryption.

    Notes
    -----
    C function: ``ncclSetEncryption``, NCCL 2.32.

    Examples
    --------
    >>> import pynccl, secrets
    >>> pynccl.set_encryption(secrets.token_hex(32), library="host")
    """
    cdef ncclEncryptionConfig_t config
    cdef ncclResult_t result
    cdef Library lib
    cdef bytes key = b""
    if isinstance(psk, str):
        key = psk.encode()
    elif isinstance(psk, (bytes, bytearray, memoryview)):
        key = bytes(psk)
    elif psk is not None:
        raise TypeError(f"set_encryption: psk must be bytes or str, not {type(psk).__name__!r}")
    if psk is not None and len(key) < PSK_MIN_BYTES:
        raise ValueError(f"set_encryption: psk has {len(key)} bytes; it must have at least {PSK_MIN_BYTES}")
    if 0 in key:
        raise ValueError("set_encryption: psk holds a zero byte, where NCCL would end it")
    lib = load(library)
    lib.needs(b"ncclSetEncryption")
    config.size = sizeof(config)
    config.magic = NCCL_API_MAGIC
    config.version = NCCL_VERSION_CODE
    config.mode = NCCL_ENCRYPTION_MODE_NONE
    config.psk = NULL
    if psk is not None:
        config.mode = NCCL_ENCRYPTION_MODE_PSK
        config.psk = key
    with nogil:
        result = lib.api.ncclSetEncryption(&config)
    if result != ncclSuccess:
        raise failure(result, b"ncclSetEncryption", lib.api, NULL, None)
    _keys[lib.path] = key
