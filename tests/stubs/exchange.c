/* A DLPack exchange table whose tensors are made in Python.
 *
 * The export calls back: the address of the managed tensor is what the object's attribute "exported" says, and
 * an exception of that attribute is the export's. The borrowing export does the same with the plain tensor at the
 * address in "borrowed". Tables live as long as the process, as DLPack asks; the
 * current stream is one value for all of them. Called with the GIL held, which guards everything here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct table {
    uint32_t major, minor;
    struct table *previous;
    void *allocate;
    int (*export_tensor)(void *object, void **out);
    void *to_object;
    int (*borrow)(void *object, void *out);
    int (*current_stream)(int32_t type, int32_t id, void **out);
};

static void *stream;

static int export_tensor(void *object, void **out) {
    PyObject *address = PyObject_GetAttrString(object, "exported");
    if (!address)
        return -1;
    *out = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return PyErr_Occurred() ? -1 : 0;
}

static int borrow(void *object, void *out) {
    PyObject *address = PyObject_GetAttrString(object, "borrowed");
    if (!address)
        return -1;
    void *tensor = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    if (PyErr_Occurred())
        return -1;
    memcpy(out, tensor, 48); /* a DLTensor */
    return 0;
}

/* What a table of another major version holds at these places nobody can know. */
static int unknown_layout(void *object, void **out) {
    (void)object, (void)out;
    abort();
}

static int current_stream(int32_t type, int32_t id, void **out) {
    (void)id;
    if (type != 2) {
        PyErr_SetString(PyExc_AssertionError, "asked for the stream of something that is no CUDA device");
        return -1;
    }
    *out = stream;
    return 0;
}

PyObject *exchange_table(uint32_t major, void *of_every_device, int older) {
    struct table *known = calloc(1, sizeof *known);
    struct table *table = known;
    stream = of_every_device;
    if (!known)
        return PyErr_NoMemory();
    *known = (struct table){.major = 1, .export_tensor = export_tensor, .borrow = borrow,
                            .current_stream = current_stream};
    if (major != 1) {
        table = calloc(1, sizeof *table);
        if (!table)
            return PyErr_NoMemory();
        *table = (struct table){.major = major, .export_tensor = unknown_layout, .previous = older ? known : NULL};
    }
    return PyCapsule_New(table, "dlpack_exchange_api", NULL);
}
