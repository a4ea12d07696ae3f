/* Loading of libnccl.so.2, of the host library, and of whatever else speaks NCCL's ABI.
 *
 * Owns the list of loaded libraries: one table for each, found again by the dynamic linker's handle.
 *
 * Promises: a load that fails leaves nothing behind, neither a handle nor memory; one that succeeds is never
 * undone. Libraries are opened RTLD_LOCAL, so that two of them, each with NCCL's names, do not bind to each
 * other. A library older than our list works for what it has.
 *
 * No lock: tables are immutable once published, and the list only grows at its head, by compare-exchange.
 * So a fork during a load in another thread leaves the child nothing locked, at least not by us.
 */
#define _GNU_SOURCE /* dlinfo */
#include "_loader.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*any_function)(void);

/* ---- a stub for each function that a library may lack ---------------------------------------- */

#define MISSING_ncclResult_t return PYNCCL_MISSING
#define MISSING_pynccl_text_t return ""
#define MISSING_void return

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif
#define DEFINE_STUB(ret, name, version, args) \
    static ret missing_##name args { MISSING_##ret; }
NCCL_SYMBOLS(DEFINE_STUB)
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

/* ---- the two lists as data ------------------------------------------------------------------- */

struct row {
    const char *name;
    int version;
    size_t slot; /* where in struct nccl_api */
    any_function missing;
};

#define NCCL_ROW(ret, name, version, args) \
    {#name, version, offsetof(struct nccl_api, name), (any_function)missing_##name},
#define HOST_ROW(ret, name, version, args) {#name, version, offsetof(struct nccl_api, name), NULL},

static const struct row nccl_rows[] = {NCCL_SYMBOLS(NCCL_ROW)};
static const struct row host_rows[] = {HOST_SYMBOLS(HOST_ROW)};

enum {
    NCCL_ROWS = sizeof nccl_rows / sizeof *nccl_rows,
    HOST_ROWS = sizeof host_rows / sizeof *host_rows
};

/* POSIX gives function and object pointers one representation; C only lets the bytes be copied. */
_Static_assert(sizeof(any_function) == sizeof(void *), "dlsym needs pointers of one size");

static void fill(struct nccl_api *api, const struct row *rows, int n) {
    for (int i = 0; i < n; i++) {
        char *slot = (char *)api + rows[i].slot;
        void *symbol = dlsym(api->dl, rows[i].name);
        if (symbol)
            memcpy(slot, &symbol, sizeof symbol);
        else
            memcpy(slot, &rows[i].missing, sizeof rows[i].missing);
    }
}

static const struct row *find_row(const struct row *rows, int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (strcmp(rows[i].name, name) == 0)
            return &rows[i];
    return NULL;
}

static int is_filled(const struct nccl_api *api, const struct row *row) {
    any_function held;
    memcpy(&held, (const char *)api + row->slot, sizeof held);
    return held != row->missing;
}

/* ---- loading --------------------------------------------------------------------------------- */

static _Atomic(struct nccl_api *) loaded;

static struct nccl_api *find_loaded(struct nccl_api *head, const void *dl) {
    while (head && head->dl != dl)
        head = head->next;
    return head;
}

/* dlerror() mostly repeats the path, which the caller's sentence has already. */
static const char *reason_of(const char *text, const char *path) {
    size_t n = strlen(path);
    if (!text)
        return "the dynamic linker gave no reason";
    if (strncmp(text, path, n) == 0 && strncmp(text + n, ": ", 2) == 0)
        return text + n + 2;
    return text;
}

static const char *resolved_path(void *dl, const char *path) {
    struct link_map *map = NULL;
    if (dlinfo(dl, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name && map->l_name[0])
        return map->l_name;
    return path;
}

static struct nccl_api *build(void *dl, const char *path, char *err, size_t errlen) {
    /* Asked first: without it, this is some other library, and nothing of it may be called. */
    if (!dlsym(dl, "ncclGetVersion")) {
        snprintf(err, errlen, "%s is not an NCCL library: it has no function ncclGetVersion", path);
        return NULL;
    }
    const char *resolved = resolved_path(dl, path);
    size_t length = strlen(resolved) + 1;
    struct nccl_api *api = calloc(1, sizeof *api + length);
    if (!api) {
        snprintf(err, errlen, "cannot load %s: out of memory", path);
        return NULL;
    }
    memcpy(api->path, resolved, length);
    api->dl = dl;
    fill(api, nccl_rows, NCCL_ROWS);
    fill(api, host_rows, HOST_ROWS);
    api->is_host = api->pyncclHostStamp != NULL;

    ncclResult_t result = api->ncclGetVersion(&api->version);
    if (result != ncclSuccess || api->version <= 0) {
        snprintf(err, errlen, "cannot use %s: ncclGetVersion returned %d and version %d", path, (int)result,
                 api->version);
        free(api);
        return NULL;
    }
    return api;
}

int nccl_api_load(const char *path, struct nccl_api **out, char *err, size_t errlen) {
    if (!path || !path[0]) { /* dlopen would take it for the program itself */
        snprintf(err, errlen, "no library given: the path is empty");
        return -1;
    }
    void *dl = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!dl) {
        snprintf(err, errlen, "cannot load %s: %s", path, reason_of(dlerror(), path));
        return -1;
    }
    struct nccl_api *head = atomic_load_explicit(&loaded, memory_order_acquire);
    struct nccl_api *known = find_loaded(head, dl);
    struct nccl_api *api = NULL;
    if (!known) {
        api = build(dl, path, err, errlen);
        if (!api) {
            dlclose(dl);
            return -1;
        }
        do { /* another thread may have been faster, with this library or another */
            known = find_loaded(head, dl);
            api->next = head;
        } while (!known && !atomic_compare_exchange_weak_explicit(&loaded, &head, api, memory_order_acq_rel,
                                                                  memory_order_acquire));
    }
    if (known) { /* its table holds a reference already: drop the one just taken */
        dlclose(dl);
        free(api);
        api = known;
    }
    *out = api;
    return 0;
}

/* ---- questions ------------------------------------------------------------------------------- */

int nccl_api_has(const struct nccl_api *api, const char *symbol) {
    const struct row *row = find_row(nccl_rows, NCCL_ROWS, symbol);
    if (!row)
        row = find_row(host_rows, HOST_ROWS, symbol);
    return row && is_filled(api, row);
}

int nccl_symbol_version(const char *symbol) {
    const struct row *row = find_row(nccl_rows, NCCL_ROWS, symbol);
    return row ? row->version : 0;
}

int nccl_symbol_count(void) { return NCCL_ROWS; }

const char *nccl_symbol_name(int i) { return i >= 0 && i < NCCL_ROWS ? nccl_rows[i].name : NULL; }
