#include "server/oomd/unix_socket.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

namespace oom {
namespace {

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

bool FillAddress(const std::string& path, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  if (path.size() >= sizeof(address->sun_path)) return false;
  std::memcpy(address->sun_path, path.data(), path.size());
  return true;
}

Status CheckFolder(const std::string& folder) {
  struct stat info = {};
  if (stat(folder.c_str(), &info) != 0)
    return ErrnoStatus(errno, "the socket's folder " + folder).Annotate("socket");
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (info.st_mode & S_ISVTX) == 0) {
    return Status(Code::kPermissionDenied,
                  "others may write to " + folder +
                      " and could replace the daemon's socket; chmod go-w it or choose "
                      "another --socket")
        .WithReason("SOCKET_FOLDER_WRITABLE")
        .WithField(folder);
  }
  return Status::Ok();
}

}  // namespace

Status CheckStaleSocket(const std::string& path, uid_t uid) {
  struct stat info = {};
  if (lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return Status::Ok();
    return ErrnoStatus(errno, path);
  }
  if (info.st_uid != uid) {
    return Status(Code::kPermissionDenied, path + " belongs to uid " + std::to_string(info.st_uid) +
                                               ", oomd runs as uid " + std::to_string(uid) +
                                               "; choose another --socket")
        .WithReason("SOCKET_NOT_OURS")
        .WithField(path);
  }
  if (!S_ISSOCK(info.st_mode)) {
    return Status(Code::kAlreadyExists,
                  path + " is there and is not a socket; remove it or choose another --socket")
        .WithReason("NOT_A_SOCKET")
        .WithField(path);
  }
  const Result<UniqueFd> connected = ConnectUnix(path);
  if (connected.ok()) {
    return Status(Code::kAlreadyExists, "a daemon listens on " + path + " already")
        .WithReason("ALREADY_RUNNING")
        .WithField(path);
  }
  return Status::Ok();
}

Result<ListeningSocket> ListeningSocket::Listen(const std::string& path) {
  sockaddr_un address;
  if (!FillAddress(path, &address)) {
    return Status(Code::kInvalidArgument, "the socket path " + path + " is longer than " +
                                              std::to_string(sizeof(address.sun_path) - 1) +
                                              " bytes, which Unix does not allow")
        .WithField("socket");
  }
  OOM_RETURN_IF_ERROR(CheckFolder(FolderOf(path)));
  OOM_RETURN_IF_ERROR(CheckStaleSocket(path, geteuid()));
  // From here on only one daemon looks at the path at a time.
  const std::string lock_path = path + ".lock";
  UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return ErrnoStatus(errno, lock_path);
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return Status(Code::kAlreadyExists, "another daemon holds " + lock_path)
        .WithReason("ALREADY_RUNNING")
        .WithField(path);
  }
  OOM_RETURN_IF_ERROR(CheckStaleSocket(path, geteuid()));
  unlink(path.c_str());
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  // The mode of the file is there from its first moment. No other thread runs yet that makes files.
  const mode_t mask = umask(0177);
  const int bound = bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = errno;
  umask(mask);
  if (bound != 0) return ErrnoStatus(error, "binding " + path);
  if (listen(fd.get(), 1024) != 0) return ErrnoStatus(errno, "listening on " + path);
  return ListeningSocket(path, std::move(lock), std::move(fd));
}

ListeningSocket::~ListeningSocket() {
  if (fd_.valid()) unlink(path_.c_str());
}

Result<UniqueFd> ConnectUnix(const std::string& path) {
  sockaddr_un address;
  UniqueFd folder;
  if (!FillAddress(path, &address)) {
    const std::string parent = FolderOf(path);
    folder = UniqueFd(open(parent.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!folder.valid()) return ErrnoStatus(errno, parent);
    const std::string name = path.substr(path.rfind('/') + 1);
    if (!FillAddress("/proc/self/fd/" + std::to_string(folder.get()) + "/" + name, &address)) {
      return Status(Code::kInvalidArgument, "the socket name " + name + " is too long");
    }
  }
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoStatus(errno, "connecting to " + path);
  }
  return fd;
}

Result<uid_t> PeerUid(int fd) {
  ucred credentials = {};
  socklen_t size = sizeof(credentials);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0)
    return ErrnoStatus(errno, "SO_PEERCRED");
  return credentials.uid;
}

}  // namespace oom
