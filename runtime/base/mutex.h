// Mutex and MutexLock are std::mutex with clang's thread-safety annotations, so that a field marked
// OOM_GUARDED_BY that is touched without its lock stops a clang build. GCC ignores the annotations.

#pragma once

#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define OOM_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define OOM_THREAD_ANNOTATION(x)
#endif

#define OOM_CAPABILITY(x) OOM_THREAD_ANNOTATION(capability(x))
#define OOM_SCOPED_CAPABILITY OOM_THREAD_ANNOTATION(scoped_lockable)
#define OOM_GUARDED_BY(x) OOM_THREAD_ANNOTATION(guarded_by(x))
#define OOM_REQUIRES(...) OOM_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define OOM_ACQUIRE(...) OOM_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define OOM_RELEASE(...) OOM_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define OOM_EXCLUDES(...) OOM_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace oom {

class OOM_CAPABILITY("mutex") Mutex {
 public:
  void Lock() OOM_ACQUIRE() { mutex_.lock(); }
  void Unlock() OOM_RELEASE() { mutex_.unlock(); }
  // BasicLockable, for std::condition_variable_any.
  void lock() OOM_ACQUIRE() { mutex_.lock(); }
  void unlock() OOM_RELEASE() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class OOM_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) OOM_ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() OOM_RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// A condition variable for Mutex. Wait releases the mutex while it sleeps.
class CondVar {
 public:
  void Wait(Mutex& mutex) OOM_REQUIRES(mutex) { condition_.wait(mutex); }
  template <class Rep, class Period>
  // Returns false on timeout.
  bool WaitFor(Mutex& mutex, std::chrono::duration<Rep, Period> timeout) OOM_REQUIRES(mutex) {
    return condition_.wait_for(mutex, timeout) == std::cv_status::no_timeout;
  }
  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable_any condition_;
};

}  // namespace oom
