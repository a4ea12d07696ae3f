/* Memory that others can map, and windows of it: what is given, refused and agreed about; that descriptors and
 * mappings are gone when their windows are; and that nobody hangs when a rank dies in the middle. */
#include "world.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/resource.h>

enum { PAGE = 4096 };

/* ---- what the process holds ---- */

static int descriptors(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

static int mappings(void) {
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "re");
    while (f && fgets(line, sizeof line, f))
        n += strstr(line, "memfd:pynccl") != NULL;
    if (f)
        fclose(f);
    return n;
}

/* ---- memory ---- */

static void memory(void) {
    char *a = NULL, *b = NULL, *c = NULL;
    FAILS(ncclUnhandledCudaError, ncclMemAlloc(NULL, 4));
    has("ptr is NULL");
    FAILS(ncclUnhandledCudaError, ncclMemAlloc((void **)&a, 0));
    has("size is 0");
    FAILS(ncclUnhandledCudaError, ncclMemAlloc((void **)&a, (size_t)1 << 46));
    has("no memory for 70368744177664 bytes");
    FAILS(ncclUnhandledCudaError, ncclMemAlloc((void **)&a, SIZE_MAX));
    CHECK(!a, "%p", (void *)a);
    OK(ncclMemFree(NULL));
    FAILS(ncclUnhandledCudaError, ncclMemFree(&a));
    has("is not from ncclMemAlloc");
    OK(ncclMemAlloc((void **)&a, 1));
    OK(ncclMemAlloc((void **)&b, 3 * PAGE + 5));
    for (int i = 0; i < 3 * PAGE + 5; i++)
        CHECK(b[i] == 0, "byte %d is %d", i, b[i]);
    memset(b, 7, 3 * PAGE + 5);
    FAILS(ncclUnhandledCudaError, ncclMemFree(b + PAGE));
    OK(ncclMemFree(b));
    FAILS(ncclUnhandledCudaError, ncclMemFree(b)); /* the pool has it */
    OK(ncclMemAlloc((void **)&c, 4 * PAGE));
    CHECK(b == c, "a freed block of the same size is used again");
    OK(ncclMemFree(a));
    OK(ncclMemFree(c));
    /* The pool is bounded. */
    enum { MANY = 100 };
    void *many[MANY];
    int before = descriptors();
    for (int i = 0; i < MANY; i++)
        OK(ncclMemAlloc(&many[i], 100));
    CHECK(descriptors() >= before + MANY - 1, "a descriptor each");
    for (int i = 0; i < MANY; i++)
        OK(ncclMemFree(many[i]));
    CHECK(descriptors() <= before + 32, "%d of %d", descriptors(), before);
}

/* A forked child has nothing of its parent's memory, and can have its own. */
static void forked_memory(void) {
    char *a, *b;
    OK(ncclMemAlloc((void **)&a, PAGE));
    strcpy(a, "parent");
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        CHECK(mappings() == 0, "%d", mappings());
        OK(ncclMemAlloc((void **)&b, PAGE));
        strcpy(b, "child");
        if (b != a)
            OK(ncclMemFree(a));
        CHECK(!strcmp(b, "child"), "%s", b);
        OK(ncclMemFree(b));
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "%#x", status);
    CHECK(!strcmp(a, "parent"), "%s", a);
    OK(ncclMemFree(a));
}

/* ---- registration ---- */

static void refusals(struct seats *s) {
    ncclComm_t c = s->comms[0];
    char *a, *outside = malloc(2 * PAGE);
    ncclWindow_t win = (ncclWindow_t)(uintptr_t)7;
    void *user = NULL;
    OK(ncclMemAlloc((void **)&a, 4 * PAGE));
    FAILS(ncclInvalidArgument, ncclCommWindowRegister(NULL, a, PAGE, &win, 0));
    has("ncclCommWindowRegister : comm argument is NULL");
    CHECK(!win, "%p", (void *)win);
    FAILS(ncclInvalidArgument, ncclCommWindowRegister(c, a, PAGE, NULL, 0));
    has("win argument is NULL");
    win = (ncclWindow_t)(uintptr_t)7;
    FAILS(ncclInvalidArgument, ncclCommWindowRegister(c, NULL, PAGE, &win, 0));
    has("invalid pointer (nil) / size 4096");
    CHECK(!win, "%p", (void *)win);
    FAILS(ncclInvalidArgument, ncclCommWindowRegister(c, a, 0, &win, 0));
    has("/ size 0");
    FAILS(ncclInvalidArgument, ncclCommWindowRegister(c, a + 64, PAGE, &win, 0));
    has("Window address must be suitably aligned.");
    FAILS(ncclInvalidArgument, ncclCommWindowRegister(c, a + PAGE, 3 * PAGE + 1, &win, 0));
    has("12289 bytes from");
    OK(ncclGroupStart()); /* an error poisons a group */
    FAILS(ncclInvalidArgument, ncclCommWindowRegister(c, a, 0, &win, 0));
    FAILS(ncclInvalidArgument, ncclGroupEnd());
    /* One rank's memory is no good: nobody has a window. */
    OK(ncclCommWindowRegister(c, s->first ? (void *)a : outside, PAGE, &win, NCCL_WIN_COLL_SYMMETRIC));
    CHECK(!win, "%p", (void *)win);
    OK(ncclMemFree(a));
    OK(ncclMemAlloc((void **)&a, 4 * PAGE));
    OK(ncclCommWindowRegister(c, a + PAGE, PAGE, &win, NCCL_WIN_COLL_SYMMETRIC));
    CHECK(win, "no window");
    OK(ncclWinGetUserPtr(c, win, &user));
    CHECK(user == a + PAGE, "%p", user);
    FAILS(ncclInvalidArgument, ncclWinGetUserPtr(NULL, win, &user));
    has("ncclWinGetUserPtr : comm argument is NULL");
    FAILS(ncclInvalidArgument, ncclWinGetUserPtr(c, win, NULL));
    FAILS(ncclInvalidArgument, ncclWinGetUserPtr(c, (ncclWindow_t)(uintptr_t)a, &user));
    has("is not a window of this communicator");
    FAILS(ncclInvalidUsage, ncclMemFree(a));
    has("is registered in a window; deregister it first");
    FAILS(ncclInvalidArgument, ncclCommWindowDeregister(NULL, win));
    OK(ncclCommWindowDeregister(c, NULL));
    FAILS(ncclInvalidArgument, ncclCommWindowDeregister(c, (ncclWindow_t)(uintptr_t)8));
    OK(ncclCommWindowDeregister(c, win));
    FAILS(ncclInvalidArgument, ncclCommWindowDeregister(c, win));
    FAILS(ncclInvalidArgument, ncclWinGetUserPtr(c, win, &user));
    OK(ncclMemFree(a));
    free(outside);
}

/* In a group, with a collective; several windows; sizes that differ; kept until the communicator goes. */
static void in_groups(struct seats *s) {
    enum { MOST = 8 };
    char *at[MOST][2];
    ncclWindow_t wins[MOST][2] = {{0}};
    int sums[MOST];
    for (int i = 0; i < s->n; i++)
        for (int k = 0; k < 2; k++)
            OK(ncclMemAlloc((void **)&at[i][k], (size_t)(s->first + i + 1) * PAGE));
    OK(ncclGroupStart());
    for (int i = 0; i < s->n; i++) {
        for (int k = 0; k < 2; k++) {
            OK(ncclCommWindowRegister(s->comms[i], at[i][k], (size_t)(s->first + i + 1) * PAGE, &wins[i][k], 1));
            CHECK(!wins[i][k], "a window before the end of the group");
        }
        sums[i] = s->first + i;
        OK(ncclAllReduce(&sums[i], &sums[i], 1, ncclInt32, ncclSum, s->comms[i], NULL));
    }
    OK(ncclGroupEnd());
    for (int i = 0; i < s->n; i++)
        CHECK(wins[i][0] && wins[i][1] && wins[i][0] != wins[i][1] && sums[i] == s->nranks * (s->nranks - 1) / 2,
            "rank %d", s->first + i);
    for (int i = 0; i < s->n; i++)
        FAILS(ncclInvalidUsage, ncclMemFree(at[i][0]));
    for (int i = 0; i < s->n; i++) {
        OK(ncclCommWindowDeregister(s->comms[i], wins[i][0]));
        OK(ncclMemFree(at[i][0])); /* others still look there, and nothing happens to them */
        OK(ncclCommDestroy(s->comms[i]));
        s->comms[i] = NULL;
        OK(ncclMemFree(at[i][1]));
    }
}

static void rounds(struct seats *s) {
    ncclComm_t c = s->comms[0], child;
    char *a;
    ncclWindow_t win;
    OK(ncclMemAlloc((void **)&a, 8 * PAGE));
    int x = 1, fds = descriptors(), maps = mappings();
    for (int i = 0; i < 200; i++) {
        OK(ncclCommWindowRegister(c, a + (i & 1) * PAGE, (size_t)(1 + i % 5) * PAGE, &win, 1));
        CHECK(win && mappings() == maps + s->nranks - 1, "%d of %d", mappings(), maps);
        OK(ncclCommWindowDeregister(c, win));
    }
    CHECK(descriptors() == fds && mappings() == maps, "%d of %d, %d of %d", descriptors(), fds, mappings(), maps);
    for (int i = 0; i < 4; i++) { /* with their communicator */
        OK(ncclCommSplit(c, 0, 0, &child, NULL));
        OK(ncclCommWindowRegister(child, a, PAGE, &win, 1));
        OK(ncclCommWindowRegister(child, a, PAGE, &win, 1));
        OK(ncclAllReduce(&x, &x, 1, ncclInt32, ncclMax, child, NULL));
        OK(i & 1 ? ncclCommAbort(child) : ncclCommDestroy(child));
        CHECK(descriptors() == fds && mappings() == maps, "%d of %d, %d of %d", descriptors(), fds, mappings(), maps);
        OK(ncclAllReduce(&x, &x, 1, ncclInt32, ncclMax, c, NULL));
    }
    OK(ncclMemFree(a));
    CHECK(mappings() == maps - 1, "what others have mapped is not kept: %d of %d", mappings(), maps);
}

static void nonblocking(struct seats *s) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t c;
    ncclWindow_t win;
    ncclResult_t state;
    void *a;
    OK(ncclCommSplit(s->comms[0], 0, 0, &c, &config));
    OK(ncclMemAlloc(&a, PAGE));
    FAILS(ncclInProgress, ncclCommWindowRegister(c, a, PAGE, &win, 1));
    do {
        usleep(1000);
        OK(ncclCommGetAsyncError(c, &state));
    } while (state == ncclInProgress);
    CHECK(state == ncclSuccess && win, "%d, %p", (int)state, (void *)win);
    OK(ncclCommWindowDeregister(c, win));
    OK(ncclCommDestroy(c));
    OK(ncclMemFree(a));
}

/* ---- failures ---- */

static void disagree(struct seats *s) {
    void *a;
    ncclWindow_t win;
    int x = 1;
    OK(ncclMemAlloc(&a, PAGE));
    if (s->first)
        FAILS(ncclInvalidUsage, ncclCommWindowRegister(s->comms[0], a, PAGE, &win, 1));
    else
        FAILS(ncclInvalidUsage, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, s->comms[0], NULL));
    has("called CommWindowRegister()");
    OK(ncclMemFree(a));
}

/* A rank has no descriptors left: it fails, and the others hear why. */
static void no_descriptors(struct seats *s) {
    void *a;
    ncclWindow_t win;
    OK(ncclMemAlloc(&a, PAGE));
    struct rlimit usual, few;
    getrlimit(RLIMIT_NOFILE, &usual);
    if (s->first == 1) {
        few = (struct rlimit){(rlim_t)descriptors(), usual.rlim_max};
        setrlimit(RLIMIT_NOFILE, &few);
        while (dup(0) >= 0) {
        }
    }
    double begin = seconds_now();
    FAILS(s->first == 1 ? ncclSystemError : ncclRemoteError, ncclCommWindowRegister(s->comms[0], a, PAGE, &win, 1));
    has("rank 1");
    has("cannot listen");
    CHECK(!win && seconds_now() - begin < 2, "%p after %g s", (void *)win, seconds_now() - begin);
    setrlimit(RLIMIT_NOFILE, &usual);
    OK(ncclMemFree(a));
}

static int killed_after; /* microseconds */

static void dies(struct seats *s) {
    void *a;
    ncclWindow_t win;
    ncclResult_t code;
    OK(ncclMemAlloc(&a, 16 * PAGE));
    pid_t killer = s->first == 1 && killed_after ? fork() : -1;
    if (!killer) {
        usleep((useconds_t)killed_after);
        kill(getppid(), SIGKILL);
        _exit(0);
    }
    if (s->first == 1 && !killed_after)
        raise(SIGKILL);
    double last;
    do {
        last = seconds_now();
        code = ncclCommWindowRegister(s->comms[0], a, 16 * PAGE, &win, 1);
        if (!code)
            OK(ncclCommWindowDeregister(s->comms[0], win));
    } while (!code);
    CHECK(code == ncclRemoteError && seconds_now() - last < 2, "%d after %g s: %s", (int)code, seconds_now() - last,
        pyncclHostLastError());
    has("CommWindowRegister #");
    has("rank 1 (pid ");
    OK(ncclMemFree(a));
}

/* world_run says that one process was killed; the others must have left well. */
static int run_killed(void) {
    struct world w = {.nprocs = 3, .nlocal = 1, .seconds = 20};
    pid_t pids[3];
    OK(ncclGetUniqueId(&w.id));
    fflush(NULL);
    for (int p = 0; p < 3; p++)
        if ((pids[p] = fork()) == 0) {
            alarm(20);
            world_process(&w, p, dies);
            exit(0);
        }
    int bad = 0;
    for (int p = 0; p < 3; p++) {
        int status = 0;
        waitpid(pids[p], &status, 0);
        if (p == 1 ? !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL : status) {
            fprintf(stderr, "process %d, killed after %d: %#x\n", p, killed_after, status);
            bad = 1;
        }
    }
    return bad;
}

int main(void) {
    memory();
    forked_memory();
    int bad = world_run(1, 3, WORLD_THREADS, 30, refusals) || world_run(3, 1, WORLD_THREADS, 30, refusals) ||
              world_run(1, 1, WORLD_THREADS, 30, in_groups) || world_run(1, 4, WORLD_GROUPED, 30, in_groups) ||
              world_run(2, 2, WORLD_GROUPED, 30, in_groups) || world_run(2, 2, WORLD_THREADS, 30, in_groups) ||
              world_run(3, 1, WORLD_THREADS, 60, rounds) || world_run(2, 1, WORLD_THREADS, 30, nonblocking) ||
              world_run(3, 1, WORLD_THREADS, 30, disagree) || world_run(3, 1, WORLD_THREADS, 30, no_descriptors);
    for (int i = 0; i < 25 && !bad; i++) {
        killed_after = i * 400;
        bad = run_killed();
    }
    /* Last: a job's thread may outlive it for a moment, and a process with threads should not fork. */
    return bad || world_run(1, 2, WORLD_THREADS, 30, nonblocking);
}
