// The daemon's listening socket, and who is at the other end of a connection. Thread-safe.

#pragma once

#include <sys/types.h>

#include <string>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

// The socket and the lock that keeps a second daemon from it. The destructor removes the socket's
// file.
class ListeningSocket {
 public:
  // Listens on `path`, mode 0600. What is there already is removed only if it is a socket of this
  // user on which nobody listens. Fails, and touches nothing, with kInvalidArgument (a path that is
  // too long), kPermissionDenied (somebody else's socket, or a folder in which others could replace
  // it), kAlreadyExists (a live daemon, or a file that is no socket).
  static Result<ListeningSocket> Listen(const std::string& path);

  ListeningSocket(ListeningSocket&&) = default;
  ListeningSocket& operator=(ListeningSocket&&) = delete;
  ~ListeningSocket();

  int fd() const { return fd_.get(); }

 private:
  ListeningSocket(std::string path, UniqueFd lock, UniqueFd fd)
      : path_(std::move(path)), lock_(std::move(lock)), fd_(std::move(fd)) {}

  std::string path_;
  UniqueFd lock_;
  UniqueFd fd_;
};

// Whether `path` may be replaced: OK if nothing is there, or a stale socket of `uid`. The codes of
// Listen.
Status CheckStaleSocket(const std::string& path, uid_t uid);

// Connects to a Unix socket; paths beyond the 107 bytes of an address go through the folder's
// descriptor.
Result<UniqueFd> ConnectUnix(const std::string& path);

// SO_PEERCRED: the uid that the peer had when it connected.
Result<uid_t> PeerUid(int fd);

}  // namespace oom
