/* Faults of a disk, preloaded: the FAULT_AT-th call of this process on a file below FAULT_ROOT fails
 * (ENOSPC, EIO), and every later one of the same kind; or it writes less than asked for (SHORT).
 * Only in the rank FAULT_RANK and the processes that it starts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int count;

/* 0: go on; otherwise the error, or -1 for a short write. */
static int fault(int fd) {
    const char *root = getenv("FAULT_ROOT"), *at = getenv("FAULT_AT");
    const char *kind = getenv("FAULT_KIND"), *rank = getenv("FAULT_RANK"), *own = getenv("RANK");
    char link[64], path[4096];
    if (!root || !at || !kind || !rank || !own || strcmp(rank, own)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, root, strlen(root))) return 0;
    if (__sync_add_and_fetch(&count, 1) < atoi(at)) return 0;
    if (!strcmp(kind, "SHORT")) return -1;
    return strcmp(kind, "EIO") ? ENOSPC : EIO;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    int what = fault(fd);
    if (what > 0) { errno = what; return -1; }
    if (what < 0 && size > 1) size = size / 2;
    return REAL(write)(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    int what = fault(fd);
    if (what > 0) { errno = what; return -1; }
    if (what < 0 && size > 1) size = size / 2;
    return REAL(pwrite64)(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    int what = fault(fd);
    if (what > 0) { errno = what; return -1; }
    if (what < 0 && number > 1) number = number / 2;
    return REAL(writev)(fd, parts, number);
}

int fsync(int fd) {
    int what = fault(fd);
    if (what > 0) { errno = what; return -1; }
    return REAL(fsync)(fd);
}
