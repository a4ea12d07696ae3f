cdef class Fields:
    cdef readonly dict values       # what was given, by name


cdef object integer(str name, object value, object low=*, object high=*, str room=*)
cdef bint flag(str name, object value) except -1
cdef bytes text(str name, object value)
