/* The table of kinds, and fingerprints: packing them and saying them.
 *
 * A fingerprint holds everything that the ranks must agree about and nothing else (never grouping, stream,
 * handle or scalar of an operation). It is the values themselves in bit fields, not a hash: two calls have
 * equal fingerprints exactly if they agree, and a mismatch can be told from the two fingerprints alone.
 *
 * No state.
 */
#include "call.h"

#include <inttypes.h>

const struct host_row HOST_ROWS[HOST_KINDS] = {
    /*                       name         reduces rooted from_root to_root spreads gathers */
    [HOST_ALL_REDUCE] =     {"AllReduce",     1, 0, 0, 0, 0, 0},
    [HOST_REDUCE] =         {"Reduce",        1, 1, 0, 1, 0, 0},
    [HOST_BROADCAST] =      {"Broadcast",     0, 1, 1, 0, 0, 0},
    [HOST_ALL_GATHER] =     {"AllGather",     0, 0, 0, 0, 0, 1},
    [HOST_REDUCE_SCATTER] = {"ReduceScatter", 1, 0, 0, 0, 1, 0},
    [HOST_ALL_TO_ALL] =     {"AlltoAll",      0, 0, 0, 0, 1, 1},
    [HOST_GATHER] =         {"Gather",        0, 1, 0, 1, 0, 1},
    [HOST_SCATTER] =        {"Scatter",       0, 1, 1, 0, 1, 0},
    [HOST_SPLIT] =          {"CommSplit",     0, 0, 0, 0, 0, 1},
    [HOST_GROW] =           {"CommGrow",      0, 0, 0, 0, 0, 1},
    [HOST_SEND] =           {"Send",          0, 0, 0, 0, 0, 0},
    [HOST_RECV] =           {"Recv",          0, 0, 0, 0, 0, 0},
    [HOST_WINDOW] =         {"CommWindowRegister", 0, 0, 0, 0, 0, 1},
    [HOST_PUT_SIGNAL] =     {"PutSignal",     0, 0, 0, 0, 0, 0},
    [HOST_SIGNAL] =         {"Signal",        0, 0, 0, 0, 0, 0},
    [HOST_WAIT_SIGNAL] =    {"WaitSignal",    0, 0, 0, 0, 0, 0},
};

#define DTYPE_NAME(name, code, bytes, python) [code] = python,
static const char *const dtype_names[] = {NCCL_DTYPES(DTYPE_NAME)};
static const char *const op_names[] = {"sum", "prod", "max", "min", "avg", "premul_sum"};

enum {
    COUNT_BITS = 40,
    KIND_AT = COUNT_BITS,
    DTYPE_AT = KIND_AT + 4,
    FORTRAN_AT = DTYPE_AT + 4,
    OP_AT = FORTRAN_AT + 1,
    ROOT_AT = OP_AT + 3, /* 12 bits */
};

_Static_assert(HOST_KINDS <= 16 && HOST_MAX_RANKS <= 4096 && ncclNumTypes <= 16, "fingerprint fields");

static uint64_t field(uint64_t print, int at, int bits) {
    return print >> at & ((UINT64_C(1) << bits) - 1);
}

uint64_t host_call_print(const struct host_call *call) {
    const struct host_row *row = &HOST_ROWS[call->kind];
    uint64_t most = (UINT64_C(1) << COUNT_BITS) - 1;
    return (call->count < most ? call->count : most) | (uint64_t)call->kind << KIND_AT |
           (uint64_t)call->dtype << DTYPE_AT | (uint64_t)call->fortran << FORTRAN_AT |
           (uint64_t)(row->reduces ? call->op.kind : 0) << OP_AT |
           (uint64_t)(row->rooted ? call->root : 0) << ROOT_AT;
}

int host_print_kind(uint64_t print) {
    return (int)field(print, KIND_AT, 4);
}

void host_print_text(struct host_text *t, uint64_t print) {
    int kind = host_print_kind(print);
    const struct host_row *row = kind < HOST_KINDS ? &HOST_ROWS[kind] : NULL;
    if (!row || kind == HOST_SPLIT || kind == HOST_GROW || kind == HOST_WINDOW) {
        host_text_add(t, "%s()", row ? row->name : "unknown");
        return;
    }
    uint64_t dtype = field(print, DTYPE_AT, 4), op = field(print, OP_AT, 3);
    host_text_add(t, "%s(count=%" PRIu64 ", %s", row->name, field(print, 0, COUNT_BITS),
        dtype < ncclNumTypes ? dtype_names[dtype] : "?");
    if (field(print, FORTRAN_AT, 1))
        host_text_add(t, ", Fortran order");
    if (row->reduces)
        host_text_add(t, ", %s", op < sizeof op_names / sizeof *op_names ? op_names[op] : "?");
    if (row->rooted)
        host_text_add(t, ", root=%" PRIu64, field(print, ROOT_AT, 12));
    host_text_add(t, ")");
}

size_t host_message_bytes(uint64_t print) {
    uint64_t dtype = field(print, DTYPE_AT, 4);
    return field(print, 0, COUNT_BITS) * (dtype < ncclNumTypes ? host_dtype_size((int)dtype) : 1);
}

void host_message_text(struct host_text *t, uint64_t print, int sends) {
    uint64_t dtype = field(print, DTYPE_AT, 4);
    host_text_add(t, "%s(count=%" PRIu64 ", %s) = %zu bytes", sends ? "Send" : "Recv",
        field(print, 0, COUNT_BITS), dtype < ncclNumTypes ? dtype_names[dtype] : "?",
        host_message_bytes(print));
}
