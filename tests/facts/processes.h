// Processes that share memory by file descriptors: children without CUDA until they use it, sockets between them.
#pragma once

#include "facts.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

// A child and the socket to it. The parent must not have used CUDA.
struct Child {
    pid_t pid = 0;
    int socket = -1;

    // Runs `work` with the other end of the socket.
    explicit Child(const std::function<void(int)> &work) {
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
        fflush(stdout);
        pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            close(ends[0]);
            work(ends[1]);
            fflush(stdout);
            exit(0);
        }
        close(ends[1]);
        socket = ends[0];
    }
    // Its exit status.
    int end() {
        int status = 0;
        waitpid(pid, &status, 0);
        close(socket);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    // Ends this program as the child has, if it failed.
    void must_end_well() {
        int status = end();
        if (status != 0) {
            _exit(status);
        }
    }
};

// A number, and with it a descriptor or none (-1).
inline void send_number(int socket, uint64_t number, int descriptor = -1) {
    char room[CMSG_SPACE(sizeof(int))] = {};
    iovec data = {&number, sizeof number};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (descriptor >= 0) {
        message.msg_control = room;
        message.msg_controllen = sizeof room;
        cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    }
    REQUIRE(sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof number);
}

// Whether a number came; false if the other side is gone.
inline bool receive_number(int socket, uint64_t *number, int *descriptor = nullptr) {
    char room[CMSG_SPACE(sizeof(int))] = {};
    iovec data = {number, sizeof *number};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *number) {
        return false;
    }
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (descriptor) {
        *descriptor = -1;
        if (header && header->cmsg_type == SCM_RIGHTS) {
            memcpy(descriptor, CMSG_DATA(header), sizeof(int));
        }
    }
    return true;
}

// The number that a child sends. If the child has ended instead, this program ends as the child has.
inline uint64_t next_number(Child &child, int *descriptor = nullptr) {
    uint64_t number;
    if (!receive_number(child.socket, &number, descriptor)) {
        int status = child.end();
        _exit(status ? status : 4);
    }
    return number;
}

// A child with a context of its own, which says how much GPU memory is free.
struct Observer {
    Child child;

    Observer() : child(answer) {}
    static void answer(int socket) {
        start_device();
        for (uint64_t asked; receive_number(socket, &asked);) {
            size_t free_bytes, total;
            NEED(cuMemGetInfo, &free_bytes, &total);
            send_number(socket, free_bytes);
        }
    }
    uint64_t free_bytes() {
        send_number(child.socket, 0);
        return next_number(child);
    }
    double free_mib() { return (double)free_bytes() / (double)MIB; }
};

inline int export_piece(CUmemGenericAllocationHandle handle) {
    int descriptor = -1;
    NEED(cuMemExportToShareableHandle, &descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    return descriptor;
}

inline CUmemGenericAllocationHandle import_piece(int descriptor) {
    CUmemGenericAllocationHandle handle;
    NEED(cuMemImportFromShareableHandle, &handle, (void *)(uintptr_t)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    return handle;
}
