/* Windows: the exported functions and their argument checks.
 *
 * A registration is a collective that becomes a work (window.c) and follows the rules of groups; its handle is
 * there when the call, or the group, has ended. As NCCL does where memory cannot be shared, it succeeds without a
 * handle if some rank's memory is not from ncclMemAlloc: on every rank, so all of them go another way.
 *
 * Everything else is local. A handle is never followed: any number is answered with an error at worst. A window
 * that covers memory keeps ncclMemFree from it, which NCCL would not notice. No state.
 */
#include "api.h"
#include "window.h"

/* What of the memory is ncclMemAlloc's must lie within one block, and begin where pages begin. */
static ncclResult_t check_range(const struct host_block *b, const char *buff, size_t size) {
    size_t offset = b ? (size_t)(buff - b->at) : 0;
    if (offset % NCCL_WIN_REQUIRED_ALIGNMENT)
        return host_fail(ncclInvalidArgument, "Window address must be suitably aligned.");
    if (b && size > b->bytes - offset)
        return host_fail(ncclInvalidArgument,
            "ncclCommWindowRegister : %zu bytes from %p go beyond the memory that ncclMemAlloc gave, which has %zu "
            "there", size, (const void *)buff, b->bytes - offset);
    return ncclSuccess;
}

static ncclResult_t check_registration(struct ncclComm *c, const void *buff, size_t size, ncclWindow_t *win) {
    ncclResult_t code = host_comm_check(c, "ncclCommWindowRegister");
    if (!code && !win)
        code = host_fail(ncclInvalidArgument, "ncclCommWindowRegister : win argument is NULL");
    if (win)
        *win = NULL;
    if (!code && (!buff || !size))
        code = host_fail(ncclInvalidArgument, "ncclCommWindowRegister : invalid pointer %p / size %zu", buff, size);
    return code ? code : host_comm_ensure(c, "ncclCommWindowRegister");
}

ncclResult_t pncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags) {
    ncclResult_t code = check_registration(comm, buff, size, win);
    if (code)
        return host_group_poison(code);
    struct host_block *block = host_block_hold(buff);
    code = check_range(block, buff, size);
    struct host_work local, *w = code ? NULL : host_group_work(&local);
    if (!w) {
        if (block)
            host_block_release(block);
        return code ? host_group_poison(code) : ncclSystemError;
    }
    if (!host_window_set(w, comm, buff, size, winFlags, block, win))
        return host_group_discard(w, host_fail(ncclSystemError, "ncclCommWindowRegister : out of memory"));
    return host_group_submit(w);
}
HOST_EXPORT(ncclCommWindowRegister);

static ncclResult_t unknown(const char *what, ncclWindow_t win) {
    return host_fail(ncclInvalidArgument, "%s : %p is not a window of this communicator", what, (void *)win);
}

/* What is under way or queued may still use it. */
static ncclResult_t begin_end(struct ncclComm *c, const char *what) {
    ncclResult_t code = host_comm_ensure_idle(c);
    if (!code && host_group_holds(c))
        code = host_fail(ncclInvalidUsage, "%s : the open group holds calls of this communicator", what);
    if (!code)
        code = host_queue_flush(c, what);
    return code ? code : host_comm_enter(c, what);
}

ncclResult_t pncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
    static const char what[] = "ncclCommWindowDeregister";
    ncclResult_t code = host_comm_check(comm, what);
    if (code || !win)
        return host_group_poison(code);
    code = begin_end(comm, what);
    if (code)
        return host_group_poison(code);
    int found = host_window_end(comm, win);
    host_comm_leave(comm);
    return found ? ncclSuccess : host_group_poison(unknown(what, win));
}
HOST_EXPORT(ncclCommWindowDeregister);

ncclResult_t pncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr) {
    static const char what[] = "ncclWinGetUserPtr";
    struct host_target t;
    ncclResult_t code = host_comm_check(comm, what);
    if (!code && !outUserPtr)
        code = host_fail(ncclInvalidArgument, "%s : outUserPtr argument is NULL", what);
    if (!code && !host_window_find(comm, win, 0, &t))
        code = unknown(what, win);
    if (!code)
        *outUserPtr = t.user;
    return code;
}
HOST_EXPORT(ncclWinGetUserPtr);
