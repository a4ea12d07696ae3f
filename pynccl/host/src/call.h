/* What a caller asked for, and the one table of the kinds of calls. */
#ifndef PYNCCL_HOST_CALL_H
#define PYNCCL_HOST_CALL_H

#include "comm.h"

enum host_kind {
    HOST_ALL_REDUCE,
    HOST_REDUCE,
    HOST_BROADCAST,
    HOST_ALL_GATHER,
    HOST_REDUCE_SCATTER,
    HOST_ALL_TO_ALL,
    HOST_GATHER,
    HOST_SCATTER,
    HOST_SPLIT, /* gathers colours and keys; not a call of its own in NCCL */
    HOST_GROW,  /* the same for a growth */
    HOST_SEND,
    HOST_RECV,
    HOST_WINDOW, /* gathers what each rank has to offer */
    HOST_PUT_SIGNAL,
    HOST_SIGNAL,
    HOST_WAIT_SIGNAL,
    HOST_KINDS,
};

/* One row per kind. From it follow the algorithm (collective.c), checks and texts. */
struct host_row {
    const char *name;
    uint8_t reduces;     /* combines the ranks' inputs under an operation */
    uint8_t rooted;      /* has a root, which is part of the fingerprint */
    uint8_t from_root;   /* only the root has an input */
    uint8_t to_root;     /* only the root has an output */
    uint8_t spreads;     /* the input has one block for each rank */
    uint8_t gathers;     /* the output has one block from each rank */
};

extern const struct host_row HOST_ROWS[HOST_KINDS];

struct host_call {
    const void *send;
    void *recv;
    size_t count;
    size_t nbytes; /* of one block: count elements */
    int kind;
    int dtype;
    int fortran; /* the binding says that the arrays are in Fortran order; part of the fingerprint only */
    int root;    /* or peer */
    struct host_op op;
    const void *scalar; /* ncclScalarDevice: where op.scalar is to be read from, when the call runs */
    uintptr_t stream;
};

/* Exactly the things that must agree, in 64 bits: count (2^40 - 1 and more count as one), kind, dtype, order,
 * operation, root. */
uint64_t host_call_print(const struct host_call *call);
/* "AllReduce(count=4, float32, sum)" from a fingerprint. */
void host_print_text(struct host_text *t, uint64_t print);
int host_print_kind(uint64_t print);

/* The same for one side of a message: what mail and order carry. Only the bytes must agree. */
size_t host_message_bytes(uint64_t print);
void host_message_text(struct host_text *t, uint64_t print, int sends);

#endif
