/* One NCCL-shaped shared library as a table of typed function pointers.
 *
 * Owns every library that the process has loaded through it. A table lives as long as the process: libraries
 * are never unloaded (NCCL has threads and exit handlers of its own), so a pointer to one never dangles.
 *
 * Linked into one extension module only, since the list of loaded libraries is static state.
 */
#ifndef PYNCCL_LOADER_H
#define PYNCCL_LOADER_H

#include "nccl_abi.h"

struct nccl_api {
#define NCCL_API_FIELD(ret, name, version, args) ret(*name) args;
    /* Never NULL: what the library lacks is a stub that returns PYNCCL_MISSING, or "" for a text. */
    NCCL_SYMBOLS(NCCL_API_FIELD)
    /* NULL when the library is NCCL. */
    HOST_SYMBOLS(NCCL_API_FIELD)
#undef NCCL_API_FIELD
    struct nccl_api *next; /* the loader's */
    void *dl;
    int version; /* NCCL's code: 23203 is 2.32.3 */
    int is_host;
    char path[]; /* of the file that was loaded, as the dynamic linker resolved it */
};

/* Load the library, or find it among the loaded ones (also under another name or through a symbolic link).
 * 0, and *out; or -1, and a sentence that names the path and the reason in err. Any thread may call it. */
int nccl_api_load(const char *path, struct nccl_api **out, char *err, size_t errlen);

/* Whether the library itself has this function of either list; 0 also for an unknown name. */
int nccl_api_has(const struct nccl_api *api, const char *symbol);

/* The first release with this function of NCCL_SYMBOLS, as NCCL codes it; 0: no such function. */
int nccl_symbol_version(const char *symbol);

/* The names in NCCL_SYMBOLS, in order: 0 <= i < nccl_symbol_count(); NULL outside. */
int nccl_symbol_count(void);
const char *nccl_symbol_name(int i);

#endif /* PYNCCL_LOADER_H */
