/* Descriptors travel over abstract unix sockets, as the segment itself does at a creation.
 *
 * Who wants descriptors listens under a random name and tells it to the others through the segment. Who gives
 * one connects, sends one message with it and closes; the message waits in the connection until it is taken.
 * Both sides ask the kernel for the other's user and process, and the message must repeat the listener's name,
 * which only the ranks of the communicator could read there; so a stranger can neither get nor plant one.
 *
 * Nothing here blocks, and nothing has a name in a file system. A giver that was stopped between its two steps
 * holds up those behind it, so its rank is among those the caller is missing. State: the caller's host_fdpass.
 */
#include "fdpass.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct message {
    uint64_t name;
    int32_t from;
};

static socklen_t address_of(uint64_t name, struct sockaddr_un *out) {
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    int n = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "pynccl-window-%016llx", (unsigned long long)name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* The other end's process, or 0 if it is another user's. */
static int peer_of(int fd) {
    struct ucred cred;
    socklen_t size = sizeof cred;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) != 0 || cred.uid != geteuid())
        return 0;
    return (int)cred.pid;
}

int host_fdpass_listen(uint64_t *name) {
    struct sockaddr_un address;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (getrandom(name, sizeof *name, 0) == (ssize_t)sizeof *name) {
        socklen_t size = address_of(*name, &address);
        if (bind(fd, (struct sockaddr *)&address, size) == 0 && listen(fd, 4096) == 0)
            return fd;
    }
    int err = errno;
    close(fd);
    errno = err;
    return -1;
}

/* ---- giving ------------------------------------------------------------------------------------------ */

static int send_with(int to, struct message m, int fd) {
    char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {&m, sizeof m};
    struct msghdr msg = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    return sendmsg(to, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof m;
}

/* Of an error of the other side nothing follows: who looks after the ranks' lives will see why. */
static int is_passing(int err) {
    return err == EAGAIN || err == EINTR || err == ECONNREFUSED || err == ECONNRESET || err == EPIPE ||
           err == ENOTCONN || err == ETOOMANYREFS;
}

int host_fdpass_give(uint64_t name, int pid, int from, int fd) {
    struct sockaddr_un address;
    socklen_t size = address_of(name, &address);
    int to = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (to < 0)
        return -1;
    int done = 0, err = 0;
    if (connect(to, (struct sockaddr *)&address, size) == 0) {
        if (peer_of(to) == pid && !(done = send_with(to, (struct message){name, from}, fd)))
            err = errno;
    } else {
        err = errno;
    }
    close(to);
    errno = err;
    return done ? 1 : !err || is_passing(err) ? 0 : -1;
}

/* ---- taking ------------------------------------------------------------------------------------------ */

static ssize_t receive(int from, struct message *m, int *fd) {
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {m, sizeof *m};
    struct msghdr msg = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(from, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&msg) : NULL;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof *fd))
        memcpy(fd, CMSG_DATA(c), sizeof *fd);
    return got;
}

int host_fdpass_take(struct host_fdpass *p, int *from, int *pid, int *fd) {
    for (;;) {
        if (p->guest < 0)
            p->guest = accept4(p->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (p->guest < 0)
            return 0;
        struct message m = {0, 0};
        int taken = -1;
        *pid = peer_of(p->guest);
        ssize_t got = *pid ? receive(p->guest, &m, &taken) : 0;
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        /* Linux may tell the end before the message in front of it: what was sent is there at the second look. */
        if (*pid && got <= 0)
            got = receive(p->guest, &m, &taken);
        close_fd(&p->guest);
        if (got == (ssize_t)sizeof m && m.name == p->name && taken >= 0) {
            *from = m.from;
            *fd = taken;
            return 1;
        }
        close_fd(&taken);
    }
}

void host_fdpass_close(struct host_fdpass *p) {
    close_fd(&p->listener);
    close_fd(&p->guest);
}
