"""The table of element types, and how a dtype of any library finds its row.

Everything here is a constant after import; nothing is locked.
"""

from libc.string cimport memchr, memcpy, strcmp, strlen

from .enums import DataType

cdef extern from *:
    """
    #include "nccl_abi.h"

    #define PYNCCL_LITTLE (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
    #define ROW(NAME, code, nbytes, name) [code] = {name, nbytes, code, 1, code < ncclFloat16 ? ELEM_INT : ELEM_FLOAT},
    #define MOVED(name, nbytes) {name, nbytes, -1, 1, ELEM_OPAQUE}

    /* The rows that elem_by_kind() picks; NCCL's own stand at their codes. */
    enum {
        INT8 = ncclInt8, UINT8 = ncclUint8, INT32 = ncclInt32, UINT32 = ncclUint32,
        INT64 = ncclInt64, UINT64 = ncclUint64,
        FLOAT16 = ncclFloat16, FLOAT32 = ncclFloat32, FLOAT64 = ncclFloat64,
        BOOL = ncclNumTypes, COMPLEX64, COMPLEX128, INT16, UINT16, COMPLEX32
    };
    static const ElemType TABLE[] = {
        NCCL_DTYPES(ROW)
        /* A valid bool is a byte 0 or 1, so that uint8's maximum is "or" and its minimum "and". */
        [BOOL] = {"bool", 1, ncclUint8, 1, ELEM_BOOL},
        [COMPLEX64] = {"complex64", 8, ncclFloat32, 2, ELEM_COMPLEX},
        [COMPLEX128] = {"complex128", 16, ncclFloat64, 2, ELEM_COMPLEX},
        [INT16] = MOVED("int16", 2),
        [UINT16] = MOVED("uint16", 2),
        [COMPLEX32] = MOVED("complex32", 4),
        /* The fp8 kinds that NCCL does not know: named, so that nobody adds their bits as integers. */
        MOVED("float8_e4m3fnuz", 1),
        MOVED("float8_e5m2fnuz", 1),
        MOVED("float8_e4m3b11fnuz", 1),
        MOVED("float8_e4m3", 1),
        MOVED("float8_e3m4", 1),
        MOVED("float8_e8m0fnu", 1),
    };
    enum { ROWS = sizeof TABLE / sizeof TABLE[0], WORTH_NAMING = ncclNumTypes + 5 };
    static const ElemType OPAQUE_ROW = MOVED("opaque", 0);
    """
    const bint PYNCCL_LITTLE
    const ElemType TABLE[]
    const ElemType OPAQUE_ROW
    enum:
        INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64
        FLOAT16, FLOAT32, FLOAT64, BOOL, COMPLEX32, COMPLEX64, COMPLEX128
        ROWS
        WORTH_NAMING        # the rows that an error message offers

OPAQUE = &OPAQUE_ROW

# Other spellings of a row's name: NumPy's C-named scalar types and its two old names.
cdef dict ALIASES = {
    "bool_": "bool", "half": "float16", "single": "float32", "double": "float64",
    "byte": "int8", "ubyte": "uint8", "short": "int16", "ushort": "uint16",
    "intc": "int32", "uintc": "uint32", "longlong": "int64", "ulonglong": "uint64",
    "csingle": "complex64", "cdouble": "complex128",
    "float8_e8m0": "float8_e8m0fnu", "float8_e8m0fnu": "float8_e8m0fnu",
}
# Python's own number types, as NumPy understands them.
cdef dict BUILTINS = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


cdef const ElemType *elem_named(const char *name) noexcept:
    """The row of this name, or NULL."""
    cdef int i
    for i in range(ROWS):
        if strcmp(TABLE[i].name, name) == 0:
            return &TABLE[i]
    return NULL


cdef const ElemType *elem_of_nccl(int code) noexcept:
    return &TABLE[code]


cdef const ElemType *elem_by_kind(char kind, size_t itemsize) noexcept:
    """The row of a NumPy kind character and a size, or NULL where these two do not settle it."""
    if kind == c"f":
        if itemsize == 4:
            return &TABLE[FLOAT32]
        if itemsize == 8:
            return &TABLE[FLOAT64]
        if itemsize == 2:
            return &TABLE[FLOAT16]
    elif kind == c"i":
        if itemsize == 8:
            return &TABLE[INT64]
        if itemsize == 4:
            return &TABLE[INT32]
        if itemsize == 1:
            return &TABLE[INT8]
        if itemsize == 2:
            return &TABLE[INT16]
    elif kind == c"u":
        if itemsize == 1:
            return &TABLE[UINT8]
        if itemsize == 8:
            return &TABLE[UINT64]
        if itemsize == 4:
            return &TABLE[UINT32]
        if itemsize == 2:
            return &TABLE[UINT16]
    elif kind == c"b" and itemsize == 1:
        return &TABLE[BOOL]
    elif kind == c"c":
        if itemsize == 8:
            return &TABLE[COMPLEX64]
        if itemsize == 16:
            return &TABLE[COMPLEX128]
        if itemsize == 4:
            return &TABLE[COMPLEX32]
    return NULL


cdef int read_typestr(const char *text, Py_ssize_t length, Found *out) noexcept:
    """Read an array interface's typestr; -1 if it is not one, or one that holds Python objects."""
    cdef Py_ssize_t i = 0
    cdef size_t size = 0
    cdef char order = c"="
    cdef char kind
    if length and text[0] in (c"<", c">", c"|", c"="):
        order = text[0]
        i = 1
    if length - i < 2:
        return -1
    kind = text[i]
    i += 1
    if not c"0" <= text[i] <= c"9":
        return -1
    while i < length and c"0" <= text[i] <= c"9":
        size = 10 * size + <size_t>(text[i] - c"0")
        if size > <size_t>0x7FFFFFFF:       # no element is that large; and no product overflows
            return -1
        i += 1
    if kind == c"U":
        size *= 4
    elif kind not in (c"i", c"u", c"f", c"c", c"b", c"V", c"M", c"m", c"S", c"a"):
        return -1
    # A date or a duration may name its unit: <M8[ns].
    if i < length and not (kind in (c"M", c"m") and text[i] == c"[" and text[length - 1] == c"]"):
        return -1
    if size == 0:
        return -1
    out.itemsize = size
    out.foreign = size > 1 and order == (c">" if PYNCCL_LITTLE else c"<") and kind not in (c"V", c"S", c"a")
    out.elem = elem_by_kind(kind, size)
    out.vague = False
    if out.elem == NULL:
        out.elem = OPAQUE
        out.vague = kind in (c"V", c"f")
    return 0


cdef int read_format(const char *text, Py_ssize_t itemsize, Found *out) noexcept:
    """Read a PEP 3118 format; -1 if the elements are Python objects."""
    cdef char order = c"@"
    cdef char code
    cdef char kind = 0
    cdef bint in_name = False
    cdef size_t i
    out.itemsize = <size_t>itemsize
    out.foreign = False
    out.vague = False
    out.elem = OPAQUE
    if text == NULL:                        # the protocol's way to say unsigned bytes
        out.elem = elem_by_kind(c"u", <size_t>itemsize)
        if out.elem == NULL:
            out.elem = OPAQUE
        return 0
    # Field names stand between colons: an "O" in one is only a letter.
    for i in range(strlen(text)):
        if text[i] == c":":
            in_name = not in_name
        elif text[i] == c"O" and not in_name:
            return -1
    if text[0] != 0 and memchr(b"@=<>!^", text[0], 6) != NULL:
        order = text[0]
        text += 1
    code = text[0]
    if code == c"Z" and text[1] in (c"e", c"f", c"d", c"g") and text[2] == 0:
        kind = c"c"
    elif code != 0 and text[1] == 0:
        if code in (c"b", c"h", c"i", c"l", c"q", c"n"):
            kind = c"i"
        elif code in (c"B", c"H", c"I", c"L", c"Q", c"N"):
            kind = c"u"
        elif code in (c"e", c"f", c"d", c"g"):
            kind = c"f"
        elif code == c"?":
            kind = c"b"
    if kind != 0:
        out.elem = elem_by_kind(kind, <size_t>itemsize)
        if out.elem == NULL:
            out.elem = OPAQUE
        out.foreign = itemsize > 1 and order in ((c">", c"!") if PYNCCL_LITTLE else (c"<", c"<"))
    return 0


cdef str dtype_name(object dtype):
    """A dtype's own name, whatever library it comes from, or None: "float32", "bfloat16"."""
    cdef object name
    if isinstance(dtype, type):
        name = BUILTINS.get(dtype) or dtype.__name__
    else:
        name = getattr(dtype, "name", None)
        if not isinstance(name, str):
            name = str(dtype)               # torch prints torch.bfloat16; it has no .name
            name = name[6:] if name.startswith("torch.") else None
    return ALIASES.get(name, name)


cdef void copy_name(char *to, str name) noexcept:
    """Copy a dtype's name into a view, cut to what fits."""
    cdef bytes text = name.encode("ascii", "replace")[:TYPE_NAME - 1]
    memcpy(to, <char *>text, len(text) + 1)


cdef const ElemType *elem_of(object dtype) except NULL:
    """The row that a ``dtype=`` argument means; TypeError if there is none."""
    cdef const ElemType *elem = NULL
    cdef Found found
    cdef bytes text
    cdef object name
    if isinstance(dtype, DataType):
        return &TABLE[<int>dtype]
    if isinstance(dtype, str):
        name = ALIASES.get(dtype, dtype)
    else:
        name = dtype_name(dtype)
        if getattr(dtype, "isnative", True) is False:
            name = None
    if name is not None:
        text = name.encode("utf-8", "replace")
        elem = elem_named(text)
        if elem == NULL and read_typestr(text, len(text), &found) == 0 and not found.foreign and found.elem != OPAQUE:
            elem = found.elem
    if elem == NULL:
        raise TypeError(
            f"dtype={dtype!r} is not an element type of pynccl; use one of "
            + ", ".join([TABLE[i].name.decode() for i in range(WORTH_NAMING)])
        )
    return elem
