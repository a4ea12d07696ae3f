"""NumPy's array type, recognised and read without importing NumPy."""

from cpython.object cimport PyObject, PyTypeObject

from pynccl._elem cimport ElemType, Found

cdef extern from *:
    # The public part of NumPy's PyArrayObject and PyArray_Descr, the same in NumPy 1.x and 2.x.
    # Nothing is read through it before _ndarray.pyx has compared it with arrays of its own making.
    """
    typedef struct {
        PyObject_HEAD
        PyTypeObject *scalar;
        char kind, letter, byteorder, flags;
        int num;
    } NDDescr;
    typedef struct {
        PyObject_HEAD
        char *data;
        int nd;
        Py_ssize_t *dimensions, *strides;
        PyObject *base;
        NDDescr *descr;
        int flags;
    } NDArray;
    """
    ctypedef struct NDDescr:
        char kind
        char byteorder
        int num
    ctypedef struct NDArray:
        char *data
        int nd
        Py_ssize_t *dimensions
        Py_ssize_t *strides
        NDDescr *descr
        int flags

cdef enum:
    ND_C_CONTIGUOUS = 0x1
    ND_F_CONTIGUOUS = 0x2
    ND_ALIGNED = 0x100
    ND_WRITEABLE = 0x400
    ND_BUILTIN = 24             # type numbers of the dtypes that NumPy itself brings
    ND_USER = 256               # and from here on, of those that other packages register
    ND_USER_KNOWN = 64

cdef PyTypeObject *ndarray_type                 # NULL until an array of NumPy was met
cdef bint struct_agrees                         # NDArray may be read
# By type number; NULL = read_dtype says more.
cdef const ElemType *builtin_elem[ND_BUILTIN]
cdef const ElemType *user_elem[ND_USER_KNOWN]


cdef inline const ElemType *native_elem(NDDescr *descr) noexcept:
    """The row of an ordinary dtype in the machine's byte order, or NULL."""
    if descr.byteorder != c"=" and descr.byteorder != c"|":
        return NULL
    if 0 <= descr.num < ND_BUILTIN:
        return builtin_elem[descr.num]
    if ND_USER <= descr.num < ND_USER + ND_USER_KNOWN:
        return user_elem[descr.num - ND_USER]
    return NULL

cdef bint is_ndarray(PyTypeObject *tp) except -1
cdef int read_dtype(object dtype, Found *out, char *name) except -1
cdef bint is_masked(object array) except -1
