/* Parameters, encryption and the log's setup: the exported functions that need no communicator.
 *
 * The parameters are the seven that NCCL 2.32.3 publishes on a machine without a driver, under its names, types,
 * defaults and spellings. A value is what the environment says at the moment of the question; only a CACHED
 * one is what it said at the first question. Texts that were handed out are kept, each once, for the life of
 * the process: NCCL's pointers stay valid, too. They are the only state, guarded by `lock`.
 *
 * As in NCCL, no failure of a parameter touches the last error.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "api.h"

enum type { TEXT, FLAG, LEVEL, LEVELS, PARTS };

static const char *const type_names[] = {
    [TEXT] = "const char*", [FLAG] = "bool", [LEVEL] = "ncclDebugLogLevel", [LEVELS] = "uint32_t",
    [PARTS] = "uint64_t"};

struct ncclParamHandle {
    const char *key;
    enum type type;
    uint64_t number;  /* default, where it is one */
    const char *text; /* default, where it is one; NULL: unset */
    int cached;
    const char *about;
};

static struct ncclParamHandle params[] = {
    {"NCCL_DEBUG_FILE", TEXT, 0, NULL, 0, "File that the log goes to; %h is the host, %p the process."},
    {"NCCL_DEBUG_TIMESTAMP_FORMAT", TEXT, 0, "[%F %T] ", 0, "Form of the times in the log, as strftime reads it."},
    {"NCCL_DEBUG_TIMESTAMP_LEVELS", LEVELS, 0x44, NULL, 0, "Levels of the log whose lines carry a time."},
    {"NCCL_SET_THREAD_NAME", FLAG, 0, NULL, 1, "Give the library's threads names."},
    {"NCCL_DEBUG_SUBSYS", PARTS, 0x1081, NULL, 0, "Parts of the library that log."},
    {"NCCL_DEBUG_LEVELS", LEVELS, 0, NULL, 0, "Levels of the log beside those of NCCL_DEBUG."},
    {"NCCL_DEBUG", LEVEL, 0, NULL, 0, "Level of the log; each holds those before it."},
};

enum { PARAMS = sizeof params / sizeof *params };

struct word {
    const char *name;
    unsigned bit; /* of a mask; the number itself for a level */
};

/* In the order in which they are printed. */
static const struct word levels[] = {
    {"VERSION", 1}, {"WARN", 2}, {"ATTN", 6}, {"INFO", 3}, {"ABORT", 4}, {"TRACE", 5}, {NULL, 0}};
static const struct word parts[] = {
    {"INIT", 0}, {"COLL", 1}, {"P2P", 2}, {"SHM", 3}, {"NET", 4}, {"GRAPH", 5}, {"TUNING", 6}, {"ENV", 7},
    {"ALLOC", 8}, {"ALLOC_HOST", 17}, {"CALL", 9}, {"PROXY", 10}, {"NVLS", 11}, {"BOOTSTRAP", 12}, {"REG", 13},
    {"PROFILE", 14}, {"RAS", 15}, {"DESTROY", 16}, {NULL, 0}};

#define ALL_LEVELS UINT64_C(0x7e)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kept {
    struct kept *next;
    char text[];
} *kept;
static int flag_asked, flag_said; /* of the one cached parameter */

static struct ncclParamHandle *find(const char *key) {
    for (int i = 0; key && i < PARAMS; i++)
        if (!strcmp(params[i].key, key))
            return &params[i];
    return NULL;
}

/* The same text for the same characters, for ever. NULL without memory. */
static const char *keep(const char *text) {
    pthread_mutex_lock(&lock);
    struct kept *k = kept;
    while (k && strcmp(k->text, text))
        k = k->next;
    if (!k && (k = malloc(sizeof *k + strlen(text) + 1)) != NULL) {
        strcpy(k->text, text);
        k->next = kept;
        kept = k;
    }
    pthread_mutex_unlock(&lock);
    return k ? k->text : NULL;
}

/* ---- from the environment's text to a value ---- */

static int is_word(const char *at, size_t length, const char *name) {
    return strlen(name) == length && !strncasecmp(at, name, length);
}

static const char *trim(const char *at, size_t *length) {
    while (*length && (*at == ' ' || *at == '\t'))
        at++, --*length;
    while (*length && (at[*length - 1] == ' ' || at[*length - 1] == '\t'))
        --*length;
    return at;
}

/* "A,B", or "^A,B" for all but these. An empty text is no bit; a word that is none makes it the default. */
static uint64_t read_mask(const char *text, const struct word *words, uint64_t all, uint64_t otherwise) {
    uint64_t mask = 0;
    int invert = *text == '^';
    text += invert;
    for (const char *end; *text; text = *end ? end + 1 : end) {
        end = strchr(text, ',') ? strchr(text, ',') : text + strlen(text);
        size_t length = (size_t)(end - text);
        const char *at = trim(text, &length);
        const struct word *w = words;
        while (w->name && !is_word(at, length, w->name))
            w++;
        if (w->name)
            mask |= UINT64_C(1) << w->bit;
        else if (is_word(at, length, "ALL"))
            mask |= all;
        else if (length)
            return otherwise;
    }
    return invert ? ~mask : mask;
}

static uint64_t read_level(const char *text) {
    size_t length = strlen(text);
    const char *at = trim(text, &length);
    for (const struct word *w = levels; w->name; w++)
        if (is_word(at, length, w->name))
            return w->bit;
    return 0;
}

static uint64_t read_flag(const char *text) {
    return !strcmp(text, "1") || !strcasecmp(text, "t") || !strcasecmp(text, "true");
}

static uint64_t number_of(const struct ncclParamHandle *p) {
    const char *text = getenv(p->key);
    uint64_t value = p->number;
    switch (p->type) {
    case FLAG:
        pthread_mutex_lock(&lock);
        if (!flag_asked && text)
            flag_said = (int)read_flag(text);
        flag_asked = 1;
        value = (uint64_t)flag_said;
        pthread_mutex_unlock(&lock);
        return value;
    case LEVEL:
        return text ? read_level(text) : value;
    case LEVELS:
        return text ? (uint32_t)read_mask(text, levels, ALL_LEVELS, value) : value;
    default:
        return text ? read_mask(text, parts, ~UINT64_C(0), value) : value;
    }
}

static const char *text_of(const struct ncclParamHandle *p) {
    const char *text = getenv(p->key);
    return text ? text : p->text;
}

/* ---- and to the text that NCCL shows ---- */

static void say_mask(struct host_text *t, uint64_t mask, const struct word *words, uint64_t all) {
    if (!mask || mask == all) {
        host_text_add(t, mask ? "ALL" : "NONE");
        return;
    }
    for (int said = 0; words->name; words++)
        if (mask >> words->bit & 1)
            host_text_add(t, "%s%s", said++ ? "," : "", words->name);
}

static const char *say(const struct ncclParamHandle *p, uint64_t number) {
    char buffer[HOST_TEXT] = "";
    struct host_text t = {buffer, sizeof buffer, 0};
    const struct word *w = levels;
    switch (p->type) {
    case TEXT:
        return text_of(p) ? keep(text_of(p)) : "";
    case FLAG:
        return number ? "TRUE" : "FALSE";
    case LEVEL:
        while (w->name && w->bit != number)
            w++;
        return w->name ? w->name : "<unknown>";
    case LEVELS:
        say_mask(&t, number, levels, ALL_LEVELS);
        return keep(buffer);
    default:
        say_mask(&t, number, parts, ~UINT64_C(0));
        return keep(buffer);
    }
}

/* ---- the functions --------------------------------------------------------------------------------- */

ncclResult_t pncclParamBind(ncclParamHandle_t *out, const char *key) {
    struct ncclParamHandle *p = find(key);
    if (!out || !p)
        return ncclInvalidArgument;
    *out = p;
    return ncclSuccess;
}
HOST_EXPORT(ncclParamBind);

static const struct ncclParamHandle *known(ncclParamHandle_t h) {
    for (int i = 0; i < PARAMS; i++)
        if (h == &params[i])
            return h;
    return NULL;
}

/* A value comes in its own width only; of the numbers that are published none is signed or small. */
static ncclResult_t get(ncclParamHandle_t h, int has, enum type type, void *out, size_t size) {
    const struct ncclParamHandle *p = known(h);
    if (!p || !out || !has || p->type != type)
        return ncclInvalidArgument;
    uint64_t value = number_of(p);
    uint32_t narrow = (uint32_t)value;
    memcpy(out, size == sizeof narrow ? (void *)&narrow : (void *)&value, size);
    return ncclSuccess;
}

#define GETTER(suffix, ctype, has, type) \
    ncclResult_t pncclParamGet##suffix(ncclParamHandle_t h, ctype *out) { \
        return get(h, has, type, out, sizeof *out); \
    } \
    HOST_EXPORT(ncclParamGet##suffix)

GETTER(I8, int8_t, 0, TEXT);
GETTER(I16, int16_t, 0, TEXT);
GETTER(I32, int32_t, 0, TEXT);
GETTER(I64, int64_t, 0, TEXT);
GETTER(U8, uint8_t, 0, TEXT);
GETTER(U16, uint16_t, 0, TEXT);
GETTER(U32, uint32_t, 1, LEVELS);
GETTER(U64, uint64_t, 1, PARTS);

ncclResult_t pncclParamGetStr(ncclParamHandle_t h, const char **out) {
    const struct ncclParamHandle *p = known(h);
    if (!p || !out || p->type != TEXT)
        return ncclInvalidArgument;
    const char *text = say(p, 0);
    if (!text)
        return ncclSystemError;
    *out = text;
    return ncclSuccess;
}
HOST_EXPORT(ncclParamGetStr);

ncclResult_t pncclParamGet(ncclParamHandle_t h, void *out, int maxLen, int *len) {
    static const size_t sizes[] = {[FLAG] = 1, [LEVEL] = 4, [LEVELS] = 4, [PARTS] = 8};
    const struct ncclParamHandle *p = known(h);
    if (!p || !out || !len || maxLen <= 0)
        return ncclInvalidArgument;
    uint64_t number = p->type == TEXT ? 0 : number_of(p);
    uint32_t middle = (uint32_t)number;
    uint8_t small = (uint8_t)number;
    const void *from = p->type == TEXT ? say(p, 0) : p->type == FLAG ? (void *)&small : p->type == PARTS ? (void *)&number : &middle;
    if (!from)
        return ncclSystemError;
    size_t size = p->type == TEXT ? strlen(from) + 1 : sizes[p->type];
    *len = 0;
    if (size > (size_t)maxLen)
        return ncclInvalidArgument;
    memcpy(out, from, size);
    *len = (int)size;
    return ncclSuccess;
}
HOST_EXPORT(ncclParamGet);

ncclResult_t pncclParamGetParameter(const char *key, const char **value, int *valueLen) {
    if (!key || !value || !valueLen)
        return ncclInvalidArgument;
    const struct ncclParamHandle *p = find(key);
    *value = p ? say(p, p->type == TEXT ? 0 : number_of(p)) : NULL;
    *valueLen = *value ? (int)strlen(*value) : 0;
    return *value ? ncclSuccess : p ? ncclSystemError : ncclInvalidArgument;
}
HOST_EXPORT(ncclParamGetParameter);

ncclResult_t pncclParamGetAllParameterKeys(const char ***table, int *tableLen) {
    static const char *keys[PARAMS];
    if (!table || !tableLen)
        return ncclInvalidArgument;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < PARAMS; i++)
        keys[i] = params[i].key;
    pthread_mutex_unlock(&lock);
    *table = keys;
    *tableLen = PARAMS;
    return ncclSuccess;
}
HOST_EXPORT(ncclParamGetAllParameterKeys);

void pncclParamDumpAll(void) {
    printf("=== ncclParam Registry Dump ===\n");
    for (int i = 0; i < PARAMS; i++) {
        const struct ncclParamHandle *p = &params[i];
        const char *now = p->type == TEXT && !text_of(p) ? "<unset>" : say(p, p->type == TEXT ? 0 : number_of(p));
        printf("%s (%s) %s\n    Current value=%s set_by=%s\n\n", p->key, type_names[p->type], p->about,
            now ? now : "<no memory>", getenv(p->key) ? "Environment" : "Default");
    }
    fflush(stdout);
}
HOST_EXPORT(ncclParamDumpAll);

/* ---- encryption and the log ------------------------------------------------------------------------ */

/* Checked as NCCL checks it, and then forgotten: nothing here leaves the machine. */
ncclResult_t pncclSetEncryption(const ncclEncryptionConfig_t *config) {
    enum { LEAST = 32 };
    if (!config)
        return ncclSuccess;
    if (config->magic != NCCL_API_MAGIC)
        return host_fail(ncclInvalidArgument, "ncclSetEncryption: config not initialized via NCCL_ENCRYPTION_CONFIG_INITIALIZER");
    if (config->mode == NCCL_ENCRYPTION_MODE_NONE)
        return ncclSuccess;
    if (config->mode != NCCL_ENCRYPTION_MODE_PSK)
        return host_fail(ncclInvalidArgument, "ncclSetEncryption: config->mode=%d is not a supported encryption mode",
            config->mode);
    if (!config->psk)
        return host_fail(ncclInvalidArgument, "ncclSetEncryption: NCCL_ENCRYPTION_MODE_PSK requires config->psk");
    if (strlen(config->psk) < LEAST)
        return host_fail(ncclInvalidArgument, "ncclSetEncryption: config->psk must be at least %d bytes", LEAST);
    return ncclSuccess;
}
HOST_EXPORT(ncclSetEncryption);

void pncclResetDebugInit(void) {
    host_log_reset();
}
HOST_EXPORT(ncclResetDebugInit);
