"""The table of element types: what NCCL reduces, and what pynccl only moves."""

cdef extern from *:
    # In C, so that the table below is constant data and its first rows come from nccl_abi.h.
    """
    enum { ELEM_INT, ELEM_FLOAT, ELEM_BOOL, ELEM_COMPLEX, ELEM_OPAQUE };
    typedef struct {
        const char *name;
        int itemsize, nccl, width, kind;
    } ElemType;
    """
    enum:
        ELEM_INT
        ELEM_FLOAT
        ELEM_BOOL
        ELEM_COMPLEX
        ELEM_OPAQUE         # moved as bytes, never reduced
    ctypedef struct ElemType:
        const char *name
        int itemsize        # 0: the size stands in the BufferView
        int nccl            # ncclDataType_t of the NCCL elements, or -1
        int width           # NCCL elements in one element: 2 for complex, else 1
        int kind

# An opaque element has no row of its own in the table: its name is written into the view.
cdef enum:
    TYPE_NAME = 24

# What reading a type string or a format found.
cdef struct Found:
    const ElemType *elem
    size_t itemsize
    bint foreign        # more than one byte, in the other byte order
    bint vague          # a size without a meaning (<V2, <f1): the array's own dtype may know the name

cdef const ElemType *OPAQUE
cdef const ElemType *elem_named(const char *name) noexcept
cdef const ElemType *elem_of_nccl(int code) noexcept
cdef const ElemType *elem_by_kind(char kind, size_t itemsize) noexcept
cdef int read_typestr(const char *text, Py_ssize_t length, Found *out) noexcept
cdef int read_format(const char *text, Py_ssize_t itemsize, Found *out) noexcept
cdef str dtype_name(object dtype)
cdef void copy_name(char *to, str name) noexcept
cdef const ElemType *elem_of(object dtype) except NULL
