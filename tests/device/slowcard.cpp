// slowcard: an accelerator that is asynchronous for real, on the CPU, for tests.
//
// It is a PrivateUse1 backend of torch. A program that runs on it runs as on a card:
//   * device memory lies on pages that the host may not touch (a host access is a SIGSEGV);
//   * every stream is a thread with a queue; copies and kernels are enqueued and run later;
//   * freed memory is reused in stream order, so a missing wait or record_stream() shows;
//   * results are those of the CPU, bit for bit, because the CPU's own kernels run.
// The loader beside this file compiles it and adds the Python module torch.slowcard.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace slowcard {

using c10::Device;
using c10::DeviceIndex;
using torch::jit::Stack;

constexpr auto CARD = c10::DeviceType::PrivateUse1;
constexpr int MAX_DEVICES = 4;
constexpr int POOL_STREAMS = 32; // as on CUDA: the 33rd new stream shares a queue with the first
constexpr size_t SPAN = 1ULL << 36; // addresses of one device
constexpr size_t GRAIN = 512; // bytes; every allocation is rounded up to it

int num_devices = 1;
std::atomic<bool> forked{false}; // threads do not survive fork(), so a child must not enqueue

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t cpu_ns() { // of this thread: other processes do not count
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

// Lets go of Python's lock while this thread waits: another thread may be the one to enqueue.
struct WithoutGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state)
      PyEval_RestoreThread(state);
  }
};

// ------------------------------------------------------------------ switches and counters

enum Kind { H2D, D2H, D2D, KERNEL, ALLOC, REPLAY, NUM_KINDS };
const char* const KIND_NAMES[] = {"h2d", "d2h", "d2d", "kernel", "alloc", "replay"};

struct Switch {
  std::atomic<int64_t> count{0}, bytes{0}, delayed_ns{0}; // since the last reset
  std::atomic<int64_t> delay_ns{0}, random_ns{0}, seed{0}, ordinal{0};
  std::atomic<int64_t> fail_in{0}; // the n-th from now fails; 0: none
  std::atomic<bool> fail_later{false}; // on the stream's thread rather than at the call
};
std::array<Switch, NUM_KINDS> switches;
std::atomic<int64_t> enqueue_ns{0}; // CPU time of the host inside calls that enqueue
std::atomic<bool> times_enqueuing{false}; // off: to ask for it takes two system calls each time
int64_t enqueue_clock_ns() { return times_enqueuing.load() ? cpu_ns() : 0; }
std::atomic<int64_t> num_syncs{0};
std::atomic<int> sync_mode{0}; // 0: count, 1: record who, 2: raise
std::mutex sync_mutex;
std::map<std::string, int64_t> syncs_by_reason;
PyObject* sync_watcher = nullptr; // called with the reason in mode 1

uint64_t scrambled(uint64_t x) { // splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// What a task waits for before it runs, and whether it runs at all.
struct Fate {
  int64_t delay_ns = 0;
  bool fails = false;
};

[[noreturn]] void raise_device_error(const std::string& message) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "slowcard: " + message);
}

// Work of one stream that is kept instead of run, and runs as one task in each replay.
struct Graph {
  struct Touch { // of memory
    char* begin;
    size_t size;
    bool writes;
    std::string name;
  };
  const class Queue* queue = nullptr; // while it is recorded
  std::shared_ptr<std::vector<std::function<void()>>> works =
      std::make_shared<std::vector<std::function<void()>>>();
  std::vector<Touch> touches{};

  void begin();
  void end();
  void replay() const;
};
thread_local Graph* recording = nullptr; // what this thread enqueues on one stream goes there

// Counts one operation of a kind; raises if a test asked for its failure here and now.
Fate decide(Kind kind, int64_t bytes) {
  TORCH_CHECK(!recording || kind == KERNEL || kind == D2D,
              "slowcard: ", KIND_NAMES[kind], " cannot be recorded in a graph");
  if (recording) // it does not happen now
    return {};
  auto& s = switches[kind];
  s.count.fetch_add(1);
  s.bytes.fetch_add(bytes);
  Fate fate;
  fate.delay_ns = s.delay_ns.load();
  if (int64_t most = s.random_ns.load())
    fate.delay_ns += scrambled(s.seed.load() * 1000003 + s.ordinal.fetch_add(1)) % most;
  s.delayed_ns.fetch_add(fate.delay_ns);
  if (s.fail_in.load() > 0 && s.fail_in.fetch_sub(1) == 1) {
    if (!s.fail_later.load()) {
      if (kind == ALLOC)
        TORCH_CHECK_WITH(OutOfMemoryError, false, "slowcard: out of memory (injected failure)");
      raise_device_error(std::string("injected failure of a ") + KIND_NAMES[kind]);
    }
    fate.fails = true;
  }
  return fate;
}

// ------------------------------------------------------------------ errors of tasks

std::mutex error_mutex;
std::string pending_error; // of a task; shown at the next synchronisation, as on CUDA

void note_error(const std::string& message) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (pending_error.empty())
    pending_error = message;
}

void raise_pending_error() {
  std::string message;
  {
    std::lock_guard<std::mutex> lock(error_mutex);
    message.swap(pending_error);
  }
  if (!message.empty())
    raise_device_error("an earlier asynchronous operation failed: " + message);
}

// ------------------------------------------------------------------ races

// Optional. A clock says, of each stream, up to which task everything has happened before a point.
// Two tasks that touch the same bytes, one of them writing, race if neither is before the other:
// then an edge is missing, however the threads happen to run.
constexpr int NUM_QUEUES = MAX_DEVICES * (POOL_STREAMS + 1);
using Clock = std::array<uint64_t, NUM_QUEUES>;

void merge(Clock& into, const Clock& from) {
  for (int i = 0; i < NUM_QUEUES; ++i)
    into[i] = std::max(into[i], from[i]);
}

struct Access {
  int queue;
  uint64_t ticket;
  std::string name;
};
struct Piece { // of memory: who touched it last
  char* end;
  std::optional<Access> writer{};
  std::vector<Access> readers{};
};

class Races {
 public:
  std::atomic<bool> is_on{false};
  std::mutex mutex; // of all that follows, and of the queues' clocks
  Clock host{}; // what the host has waited for
  std::vector<std::string> found;

  void start(bool on) {
    std::lock_guard<std::mutex> lock(mutex);
    pieces_.clear();
    found.clear();
    is_on = on;
  }

  void touch(char* begin, char* end, bool writes, const Access& access, const Clock& clock) {
    auto before = [&](const Access& old) { return old.ticket <= clock[old.queue]; };
    auto race = [&](const Access& old, const char* what) {
      if (!before(old) && found.size() < 1000)
        found.push_back(access.name + (writes ? " writes" : " reads") + " what " + old.name +
                        what + ", and nothing orders them");
    };
    cut(begin), cut(end);
    for (char* at = begin; at < end;) {
      auto next = pieces_.lower_bound(at);
      if (next == pieces_.end() || next->first != at) { // nobody has touched these bytes
        char* stop = next == pieces_.end() ? end : std::min(end, next->first);
        next = pieces_.emplace(at, Piece{stop}).first;
      }
      Piece& piece = next->second;
      if (piece.writer)
        race(*piece.writer, " writes");
      if (writes) {
        for (auto& reader : piece.readers)
          race(reader, " reads");
        piece.writer = access;
        piece.readers.clear();
      } else {
        auto& readers = piece.readers;
        readers.erase(std::remove_if(readers.begin(), readers.end(), before), readers.end());
        readers.push_back(access);
      }
      at = piece.end;
    }
  }

 private:
  void cut(char* at) { // lets a piece begin here if one lies around it
    auto after = pieces_.upper_bound(at);
    if (after == pieces_.begin())
      return;
    auto around = std::prev(after);
    if (around->first == at || around->second.end <= at)
      return;
    Piece rest = around->second;
    around->second.end = at;
    pieces_.emplace(at, std::move(rest));
  }

  std::map<char*, Piece> pieces_;
};
Races& races = *new Races;

// ------------------------------------------------------------------ streams

constexpr auto POLLING = std::chrono::microseconds(30);

// A queue and the thread that empties it in order. A ticket counts the tasks up to a point.
class Queue {
 public:
  const DeviceIndex device;
  const c10::StreamId id;
  std::atomic<int64_t> delay_ns{0}; // before each task of this stream
  Clock clock{}; // before the next task

  Queue(DeviceIndex device, c10::StreamId id) : device(device), id(id) {}

  uint64_t push(std::function<void()> work, Fate fate = {}) {
    TORCH_CHECK(!forked, "slowcard cannot be used in a forked process; start it with spawn");
    if (recording && recording->queue == this) {
      recording->works->push_back(std::move(work));
      return last();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    tasks_.push_back({std::move(work), fate});
    pushed_.store(pushed_.load() + 1);
    if (races.is_on) {
      std::lock_guard<std::mutex> clocks(races.mutex);
      merge(clock, races.host);
      clock[index()] = pushed_.load();
    }
    if (asleep_)
      more_.notify_one();
    return pushed_.load();
  }

  int index() const { return device * (POOL_STREAMS + 1) + id; }

  // The next task of this stream runs after what another stream has enqueued by now.
  void follow(Queue& other, uint64_t ticket, const Clock& then) {
    if (this == &other)
      return;
    TORCH_CHECK(!recording, "slowcard: a wait for another stream cannot be recorded in a graph");
    push([&other, ticket] { other.wait_for(ticket); });
    if (races.is_on) {
      std::lock_guard<std::mutex> clocks(races.mutex);
      merge(clock, then);
    }
  }
  void follow(Queue& other) { follow(other, other.last(), other.clock); }

  uint64_t last() const { return pushed_.load(); }
  bool reached(uint64_t ticket) const { return done_.load() >= ticket; }

  void wait_for(uint64_t ticket) {
    if (reached(ticket) || forked)
      return;
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiters_;
    progress_.wait(lock, [&] { return reached(ticket); });
    --waiters_;
  }

 private:
  struct Task {
    std::function<void()> work;
    Fate fate;
  };

  void run() {
    std::deque<Task> taken;
    for (uint64_t num_taken = 0;; num_taken += taken.size()) {
      poll(num_taken);
      taken.clear();
      {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_ = true;
        more_.wait(lock, [&] { return !tasks_.empty(); });
        asleep_ = false;
        taken.swap(tasks_); // all at once: host and thread meet at the lock less often
      }
      for (Task& task : taken)
        finish(task);
    }
  }

  // A card looks for work by itself; only a stream that was idle for a while is woken by the host.
  void poll(uint64_t num_taken) const {
    const auto end = std::chrono::steady_clock::now() + POLLING;
    while (pushed_.load() == num_taken && std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
  }

  void finish(Task& task) {
    if (int64_t ns = task.fate.delay_ns + delay_ns.load())
      std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
    try {
      if (task.fate.fails)
        note_error("injected failure");
      else
        task.work();
    } catch (const std::exception& error) {
      note_error(error.what());
    }
    task.work = nullptr; // frees what it holds before anyone hears that it is done
    done_.store(done_.load() + 1);
    if (waiters_.load()) {
      std::lock_guard<std::mutex> lock(mutex_); // who waits has looked at done_, or sleeps
      progress_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable more_, progress_;
  std::deque<Task> tasks_;
  std::atomic<uint64_t> pushed_{0}, done_{0};
  std::atomic<int> waiters_{0};
  bool started_ = false, asleep_ = false;
};

// Holds a stream at a task until a test lets it go: for tests that do not sleep.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;

  void open() {
    std::lock_guard<std::mutex> lock(mutex);
    is_open = true;
    changed.notify_all();
  }
  void pass() { // a test that waits for what it holds fails late rather than never
    std::unique_lock<std::mutex> lock(mutex);
    if (!changed.wait_for(lock, std::chrono::minutes(1), [&] { return is_open; }))
      note_error("a stream was held for a minute; does the host wait for it?");
  }
};

// Queues are never destroyed: their threads may outlive every static object.
struct Card {
  std::vector<Queue*> queues; // the default stream is number 0
  std::atomic<uint64_t> next{0};
};
Card* cards = [] {
  auto* made = new Card[MAX_DEVICES];
  for (int device = 0; device < MAX_DEVICES; ++device)
    for (int id = 0; id <= POOL_STREAMS; ++id)
      made[device].queues.push_back(new Queue(device, id));
  return made;
}();

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, MAX_DEVICES> current_ids{};

void check_device(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < num_devices, "slowcard has no device ", int(index),
              "; it has ", num_devices);
}
Queue& queue_of(const c10::Stream& stream) {
  return *cards[stream.device_index()].queues.at(stream.id());
}
Queue& current_queue(DeviceIndex device) { return *cards[device].queues[current_ids[device]]; }
c10::Stream stream_of(DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(CARD, device), id);
}

// Every wait of the host is announced here before anything is enqueued for it, so that tests can
// count, name and forbid it.
void announce_wait(const std::string& reason) {
  TORCH_CHECK(!recording, "slowcard: the host cannot wait while a graph is recorded: ", reason);
  num_syncs.fetch_add(1);
  {
    std::lock_guard<std::mutex> lock(sync_mutex);
    ++syncs_by_reason[reason];
  }
  TORCH_CHECK(sync_mode.load() != 2, "slowcard: the host would wait for the device: ", reason);
  if (sync_mode.load() == 1) {
    py::gil_scoped_acquire gil;
    const py::handle watcher(sync_watcher);
    watcher(reason);
  }
}
void host_knows(const Clock& clock) {
  if (races.is_on) {
    std::lock_guard<std::mutex> lock(races.mutex);
    merge(races.host, clock);
  }
}
void host_waits(Queue& queue, uint64_t ticket, const Clock& then) {
  {
    WithoutGil released;
    queue.wait_for(ticket);
  }
  host_knows(then);
  raise_pending_error();
}
void host_waits(Queue& queue) { host_waits(queue, queue.last(), queue.clock); }

void wait_for_card(DeviceIndex device) {
  for (auto* queue : cards[device].queues) {
    queue->wait_for(queue->last());
    host_knows(queue->clock);
  }
}

// ------------------------------------------------------------------ memory

void note_access(
    Queue& queue, uint64_t ticket, char* begin, size_t size, bool writes, const std::string& name) {
  if (recording && size)
    recording->touches.push_back({begin, size, writes, name});
  if (recording || !races.is_on || !size)
    return;
  std::lock_guard<std::mutex> lock(races.mutex);
  races.touch(
      begin, begin + size, writes,
      {queue.index(), ticket, name + " (stream " + std::to_string(queue.id) + ")"}, queue.clock);
}

// The host sees addresses that it may not touch; the streams' threads add `secret` to them.
char* forbidden = nullptr;
ptrdiff_t secret = 0;

void reserve_addresses() {
  const size_t all = SPAN * MAX_DEVICES;
  auto map = [&](int protection) {
    void* at = mmap(nullptr, all, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "slowcard could not reserve ", all, " bytes of addresses");
    return static_cast<char*>(at);
  };
  forbidden = map(PROT_NONE);
  secret = map(PROT_READ | PROT_WRITE) - forbidden;
}

// Pinned host memory is the same for both sides, also inside a tensor that says it is the card's.
void* device_side(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  const bool on_card = at >= forbidden && at < forbidden + SPAN * MAX_DEVICES;
  return on_card ? at + secret : at;
}

struct Block {
  class Pool* pool;
  char* address;
  size_t size, asked; // bytes
  Queue* owner; // its stream may reuse the block at once when it is freed
  std::set<Queue*> users{}; // other streams, from record_stream()
  struct Use {
    Queue* queue;
    uint64_t ticket;
    Clock clock;
  };
  std::vector<Use> pending{}; // what they had enqueued at the free
};

// A caching allocator: freed blocks are kept by stream. One for each card, one for pinned memory.
class Pool {
 public:
  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t capacity = SIZE_MAX;

  Pool(char* base, DeviceIndex device) : device_(device) {
    if (base)
      gaps_[base] = SPAN;
  }

  Block* allocate(size_t asked, Queue* owner) {
    const size_t size = (asked + GRAIN - 1) / GRAIN * GRAIN;
    std::lock_guard<std::mutex> lock(mutex_);
    ++stats.num_device_alloc;
    reclaim();
    Block* block = take_idle(size, owner);
    if (!block) {
      if (size > capacity - std::min(capacity, reserved())) {
        ++stats.num_alloc_retries;
        release();
      }
      if (size > capacity - std::min(capacity, reserved())) {
        ++stats.num_ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "slowcard: out of memory. Tried to allocate ", asked,
            " bytes. Device ", int(device_), " has ", capacity, " bytes, of which ",
            stats.allocated_bytes[0].current, " are allocated and ", reserved(), " reserved");
      }
      block = new Block{this, take_gap(size), size, asked, owner};
      by_address_[block->address] = block;
      stats.segment[0].increase(1);
      stats.reserved_bytes[0].increase(size);
    }
    block->asked = size;
    stats.allocation[0].increase(1);
    stats.active[0].increase(1);
    stats.allocated_bytes[0].increase(size);
    stats.active_bytes[0].increase(size);
    stats.requested_bytes[0].increase(asked);
    return block;
  }

  void free(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats.allocation[0].decrease(1);
    stats.active[0].decrease(1);
    stats.allocated_bytes[0].decrease(block->asked);
    stats.active_bytes[0].decrease(block->asked);
    for (auto* user : block->users)
      if (user != block->owner)
        block->pending.push_back({user, user->last(), user->clock});
    block->users.clear();
    if (is_unused(block))
      idle_.emplace(std::make_pair(block->owner, block->size), block);
    else
      waiting_.push_back(block);
  }

  // Memory of the host's own that the card may use from now on, as cudaHostRegister does it.
  void add_foreign(char* address, size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    by_address_[address] = new Block{this, address, size, size, nullptr};
  }
  bool remove_foreign(char* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return by_address_.erase(address);
  }

  // The block around an address, or null. The stream `user` is remembered until the free.
  Block* find(const void* address, Queue* user = nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = by_address_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == by_address_.begin())
      return nullptr;
    Block* block = std::prev(after)->second;
    if (address >= block->address + block->size)
      return nullptr;
    if (user)
      block->users.insert(user);
    return block;
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    release();
  }

  size_t reserved() const { return stats.reserved_bytes[0].current; }

 private:
  Block* take_idle(size_t size, Queue* owner) {
    auto found = idle_.lower_bound({owner, size});
    // A block twice as large stays for those that need it.
    if (found == idle_.end() || found->first.first != owner || found->first.second > 2 * size)
      return nullptr;
    found = std::prev(idle_.upper_bound(found->first)); // the last freed: a late reader shows
    Block* block = found->second;
    idle_.erase(found);
    return block;
  }

  static bool is_unused(Block* block) {
    for (auto& use : block->pending)
      if (!use.queue->reached(use.ticket))
        return false;
    for (auto& use : block->pending)
      host_knows(use.clock); // the host orders the next user behind them
    block->pending.clear();
    return true;
  }

  void reclaim() {
    for (size_t i = 0; i < waiting_.size();) {
      Block* block = waiting_[i];
      if (!is_unused(block)) {
        ++i;
        continue;
      }
      idle_.emplace(std::make_pair(block->owner, block->size), block);
      waiting_[i] = waiting_.back();
      waiting_.pop_back();
    }
  }

  // Gives all freed memory back, as cudaFree does: after everything that is under way.
  void release() {
    if (idle_.empty() && waiting_.empty())
      return;
    ++stats.num_sync_all_streams;
    // Python's lock stays held: who let go of it here, under mutex_, could wait for it for ever.
    for (int device = 0; device < MAX_DEVICES; ++device)
      wait_for_card(device);
    reclaim();
    for (auto& [key, block] : idle_) {
      give_gap(block->address, block->size);
      by_address_.erase(block->address);
      stats.segment[0].decrease(1);
      stats.reserved_bytes[0].decrease(block->size);
      ++stats.num_device_free;
      delete block;
    }
    idle_.clear();
  }

  char* take_gap(size_t size) {
    if (device_ < 0) { // pinned memory is the host's own
      void* at = nullptr;
      TORCH_CHECK(posix_memalign(&at, 4096, size) == 0, "slowcard: no memory to pin");
      return static_cast<char*>(at);
    }
    for (auto& [base, length] : gaps_) {
      if (length < size)
        continue;
      char* at = base;
      const size_t rest = length - size;
      gaps_.erase(base);
      if (rest)
        gaps_[at + size] = rest;
      return at;
    }
    TORCH_CHECK(false, "slowcard: no addresses are left");
  }

  void give_gap(char* at, size_t size) {
    if (device_ < 0)
      return ::free(at);
    auto after = gaps_.emplace(at, size).first;
    auto next = std::next(after);
    if (next != gaps_.end() && at + size == next->first) {
      after->second += next->second;
      gaps_.erase(next);
    }
    if (after != gaps_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == at) {
        before->second += after->second;
        gaps_.erase(after);
      }
    }
    // Whole pages go back to the system.
    auto first = (reinterpret_cast<uintptr_t>(at) + 4095) / 4096 * 4096;
    auto end = reinterpret_cast<uintptr_t>(at + size) / 4096 * 4096;
    if (end > first)
      madvise(reinterpret_cast<char*>(first) + secret, end - first, MADV_DONTNEED);
  }

  const DeviceIndex device_; // -1: pinned memory
  std::mutex mutex_;
  std::map<char*, size_t> gaps_; // unreserved addresses
  std::map<char*, Block*> by_address_;
  std::multimap<std::pair<Queue*, size_t>, Block*> idle_;
  std::vector<Block*> waiting_; // freed, but another stream has not finished with them
};

std::array<Pool*, MAX_DEVICES> pools{};
Pool* pinned = nullptr;

void free_block(void* block) { static_cast<Block*>(block)->pool->free(static_cast<Block*>(block)); }

struct CardAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device;
    const Device where(CARD, device);
    if (bytes == 0)
      return {nullptr, nullptr, &c10::detail::deleteNothing, where};
    decide(ALLOC, bytes);
    auto* block = pools[device]->allocate(bytes, &current_queue(device));
    return {block->address, block, &free_block, where};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Queue& queue = current_queue(current_device);
    to = device_side(to), from = device_side(from);
    const auto ticket = queue.push([=] { memcpy(to, from, bytes); }, decide(D2D, bytes));
    note_access(queue, ticket, static_cast<char*>(const_cast<void*>(from)), bytes, false, "resize");
    note_access(queue, ticket, static_cast<char*>(to), bytes, true, "resize");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int device = 0; device < num_devices; ++device)
      pools[device]->empty_cache();
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (ptr.get())
      pools[stream.device_index()]->find(ptr.get(), &queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    check_device(device);
    return pools[device]->stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    for (auto* stat : all(device))
      stat->reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    for (auto* stat : all(device))
      stat->reset_peak();
  }
  // No "override": torch before 2.10 has no such member.
  virtual std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) {
    check_device(device);
    const size_t total = pools[device]->capacity;
    return {total - std::min(total, pools[device]->reserved()), total};
  }

 private:
  static std::vector<c10::CachingAllocator::Stat*> all(DeviceIndex device) {
    check_device(device);
    auto& s = pools[device]->stats;
    return {&s.allocation[0], &s.segment[0], &s.active[0], &s.allocated_bytes[0],
            &s.reserved_bytes[0], &s.active_bytes[0], &s.requested_bytes[0]};
  }
};
CardAllocator* card_allocator = new CardAllocator;

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0)
      return {nullptr, nullptr, &c10::detail::deleteNothing, c10::kCPU};
    auto* block = pinned->allocate(bytes, nullptr);
    return {block->address, block, &free_block, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void* ptr, void*, c10::Stream stream) override {
    return pinned->find(ptr, &queue_of(stream)) != nullptr;
  }
  void empty_cache() override { pinned->empty_cache(); }
  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.allocated_bytes = pinned->stats.allocated_bytes[0];
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { pinned->stats.allocated_bytes[0].reset_peak(); }
};
PinnedAllocator* pinned_allocator = new PinnedAllocator;

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> = {}, std::optional<Device> device = {},
    std::optional<bool> pin = {}) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(Device(CARD)));
  return at::detail::empty_strided_generic(
      size, stride, card_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(Device(CARD)));
  return at::detail::empty_generic(
      size, card_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

// Storage.resize_(): new memory, the old bytes copied in stream order; 0 bytes free the memory.
void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  const c10::DeviceGuard guard(storage->device());
  c10::DataPtr fresh = card_allocator->allocate(bytes);
  if (const size_t kept = std::min(bytes, storage->nbytes()))
    card_allocator->copy_data(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

void set_geometry(
    at::TensorImpl* self, at::IntArrayRef size, at::OptionalIntArrayRef stride) {
  if (stride)
    self->set_sizes_and_strides(size, *stride);
  else
    self->set_sizes_contiguous(size);
  if (self->numel() == 0)
    return;
  const size_t needed = at::detail::computeStorageNbytes(
      self->sizes(), self->strides(), self->dtype().itemsize(), self->storage_offset());
  if (needed > self->storage().nbytes())
    resize_storage(self->unsafe_storage().unsafeGetStorageImpl(), needed);
}

const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size)
    set_geometry(impl, size, std::nullopt);
  if (format)
    impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  set_geometry(impl, size, stride.data() ? at::OptionalIntArrayRef(stride) : std::nullopt);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t size = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {size}, {});
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, card_allocator->allocate(0), card_allocator, true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

// ------------------------------------------------------------------ CPU tensors on device memory

// The same tensor as the device's threads see it: a CPU tensor on the same bytes, which it does
// not own. Two views of one storage stay views of one storage.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    TORCH_CHECK(tensor.layout() == c10::kStrided, "slowcard has only dense tensors");
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    c10::Storage* alias = nullptr;
    for (auto& [known, made] : storages_)
      if (known == storage)
        alias = &made;
    if (!alias) {
      storages_.emplace_back(
          storage,
          c10::Storage(
              c10::Storage::use_byte_size_t(), storage->nbytes(),
              c10::DataPtr(device_side(storage->data()), c10::kCPU), nullptr, false));
      alias = &storages_.back().second;
    }
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(*alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj())
      made._set_conj(true);
    if (tensor.is_neg())
      made._set_neg(true);
    return made;
  }

  // A view on the device that corresponds to a view of an alias of `base`.
  at::Tensor back(const at::Tensor& view, const at::Tensor& base) const {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), view.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        view.sizes(), view.strides(), view.storage_offset());
    return made;
  }

 private:
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages_;
};

bool is_card(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == CARD;
}

// Notes the bytes of a tensor: its rows, or from the first to the last where there are many.
void note_access(
    Queue& queue, uint64_t ticket, const at::Tensor& tensor, bool writes, const std::string& name) {
  if (!(races.is_on || recording) || !tensor.defined() || tensor.numel() == 0 || tensor.is_meta() ||
      tensor.unsafeGetTensorImpl()->is_wrapped_number())
    return;
  if (tensor.dim() > 0 && !tensor.is_non_overlapping_and_dense() && tensor.size(0) <= 4096) {
    for (int64_t i = 0; i < tensor.size(0); ++i) {
      if (i && tensor.stride(0) == 0)
        break; // expanded: the same bytes again
      note_access(queue, ticket, tensor.select(0, i), writes, name);
    }
    return;
  }
  int64_t last = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    last += (tensor.size(d) - 1) * tensor.stride(d);
  note_access(
      queue, ticket, static_cast<char*>(device_side(tensor.data_ptr())), last * tensor.itemsize(),
      writes, name);
}

// ------------------------------------------------------------------ copies

// Kernels must not start autograd, and must use as many threads as the host asked for.
struct KernelScope {
  at::AutoDispatchBelowADInplaceOrView below;
  explicit KernelScope(int threads) {
    static thread_local int have = 0;
    if (have != threads)
      at::set_num_threads(have = threads);
  }
};

void copy(const at::Tensor& to, const at::Tensor& from_any, bool non_blocking, const char* why) {
  const at::Tensor from =
      from_any.sizes() == to.sizes() ? from_any : from_any.expand(to.sizes());
  if (to.numel() == 0)
    return;
  const int64_t start = enqueue_clock_ns();
  const bool to_card = is_card(to), from_card = is_card(from);
  TORCH_CHECK((to_card || to.is_cpu()) && (from_card || from.is_cpu()),
              "slowcard copies to and from the CPU only");
  const Device device = to_card ? to.device() : from.device();
  const c10::DeviceGuard guard(device);
  Queue& queue = current_queue(device.index());
  const Kind kind = !from_card ? H2D : !to_card ? D2H : D2D;
  const at::Tensor& host = to_card ? from : to;
  const bool waits =
      kind != D2D && !(non_blocking && pinned->find(host.data_ptr(), &queue));
  if (waits)
    announce_wait(why);
  const Fate fate = decide(kind, to.nbytes());
  if (to_card && from_card && to.device() != from.device()) { // after what the source's stream does
    queue.follow(current_queue(from.device().index()));
  }
  uint64_t ticket;
  if (to.dtype() == from.dtype() && to.is_contiguous() && from.is_contiguous() &&
      to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg()) {
    void* target = device_side(to.data_ptr());
    const void* source = device_side(from.data_ptr());
    ticket = queue.push([=, n = to.nbytes()] { memmove(target, source, n); }, fate);
  } else {
    Aliases aliases;
    ticket = queue.push(
        [to = aliases.of(to), from = aliases.of(from), n = at::get_num_threads()] {
          KernelScope scope(n);
          to.copy_(from);
        },
        fate);
  }
  note_access(queue, ticket, from, false, std::string("copy ") + KIND_NAMES[kind]);
  note_access(queue, ticket, to, true, std::string("copy ") + KIND_NAMES[kind]);
  enqueue_ns.fetch_add(enqueue_clock_ns() - start);
  if (kind == D2D && to.device() != from.device()) // the source must not change before it was read
    current_queue(from.device().index()).follow(queue);
  if (waits)
    host_waits(queue, ticket, queue.clock);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  copy(self, source, non_blocking, "copy that is not (pinned and non_blocking)");
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  auto value = at::empty(self.sizes(), self.options().device(c10::kCPU));
  copy(value, self, false, "item");
  return at::_local_scalar_dense(value);
}

// ------------------------------------------------------------------ graphs

void Graph::begin() {
  const Queue& current = current_queue(current_device);
  TORCH_CHECK(!recording, "slowcard: another graph is being recorded");
  TORCH_CHECK(current.id, "slowcard: work of the default stream cannot be recorded");
  TORCH_CHECK(works->empty(), "slowcard: the graph has been recorded");
  queue = &current;
  recording = this;
}

void Graph::end() {
  TORCH_CHECK(recording == this, "slowcard: this graph is not being recorded");
  recording = nullptr;
  queue = nullptr;
}

void Graph::replay() const {
  TORCH_CHECK(!recording, "slowcard: a graph cannot be recorded in a graph");
  const int64_t start = enqueue_clock_ns();
  const Fate fate = decide(REPLAY, 0);
  Queue& current = current_queue(current_device);
  const auto ticket = current.push(
      [works = works] {
        for (auto& work : *works)
          work();
      },
      fate);
  for (auto& touch : touches)
    note_access(current, ticket, touch.begin, touch.size, touch.writes, touch.name);
  enqueue_ns.fetch_add(enqueue_clock_ns() - start);
}

// ------------------------------------------------------------------ random numbers

// A CPU generator in the card's clothes: the numbers are those of the CPU for the same seed.
// Kernels take from it in the order in which they were enqueued, whatever their streams.
struct CardGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  Queue* last_queue = nullptr;
  uint64_t last_ticket = 0;

  explicit CardGenerator(DeviceIndex device)
      : GeneratorImpl(Device(CARD, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator()) {}
  void settle() const { // with Python's lock: the caller may hold mutex_
    if (last_queue)
      last_queue->wait_for(last_ticket);
  }
  void set_current_seed(uint64_t seed) override {
    settle();
    cpu.set_current_seed(seed);
  }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override {
    settle();
    return cpu.seed();
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "slowcard generators have no offset"); }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    settle();
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    settle();
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  CardGenerator* clone_impl() const override {
    settle();
    auto* made = new CardGenerator(device_.index());
    made->cpu = cpu.clone();
    return made;
  }
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < MAX_DEVICES; ++i)
      all->push_back(at::make_generator<CardGenerator>(i));
    return all;
  }();
  return made->at(device < 0 ? current_device : device);
}

// On the CPU, dropout draws its numbers so; torch calls this operator on other devices alone.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true))
    return {input.clone(), at::ones_like(input, input.options().dtype(c10::kBool))};
  auto noise = at::empty_like(input).bernoulli_(1 - p);
  auto mask = noise.to(c10::kBool);
  return {input.mul(noise.div_(1 - p)), mask};
}

// ------------------------------------------------------------------ every other operator

// What the schema of an operator says, read once.
struct OpInfo {
  std::vector<bool> written; // by argument
  std::vector<int> returned; // by return: the written argument that it is, or -1
  int generator = -1; // argument
  bool is_view = false;
  bool returns_tensors = true;
};

const OpInfo& info_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, OpInfo> known;
  const auto& schema = op.schema();
  auto found = known.find(&schema);
  if (found != known.end())
    return found->second;
  OpInfo info;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    info.written.push_back(alias && alias->isWrite());
    if (arguments[i].type()->str().find("Generator") != std::string::npos)
      info.generator = i;
  }
  for (const auto& value : schema.returns()) {
    const auto* alias = value.alias_info();
    int same = -1;
    if (alias && alias->isWrite())
      for (size_t i = 0; i < arguments.size(); ++i)
        if (info.written[i] && *arguments[i].alias_info() == *alias)
          same = i;
    info.returned.push_back(same);
    info.is_view |= alias && !alias->isWrite();
    const auto kind = value.type()->kind();
    info.returns_tensors &= kind == c10::TypeKind::TensorType ||
        (kind == c10::TypeKind::ListType &&
         value.type()->containedType(0)->kind() == c10::TypeKind::TensorType);
  }
  return known.emplace(&schema, std::move(info)).first->second;
}

// Applies a function to every tensor in a value: a tensor, a list, or a list of optional ones.
template <typename F>
c10::IValue map_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor())
    return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const auto& tensor : value.toTensorVector())
      made.push_back(f(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& tensor : value.toOptionalTensorVector())
      made.push_back(tensor ? std::optional<at::Tensor>(f(*tensor)) : std::nullopt);
    return made;
  }
  return value;
}

struct Geometry {
  std::vector<int64_t> sizes, strides;
  caffe2::TypeMeta dtype;
  bool defined = false;
  explicit Geometry(const at::Tensor& tensor) {
    if ((defined = tensor.defined()))
      sizes = tensor.sizes().vec(), strides = tensor.strides().vec(), dtype = tensor.dtype();
  }
};
// The tensors of each return and, after them, those of each written argument; or unknown.
struct Shapes {
  bool known = false;
  std::vector<std::vector<Geometry>> returns, written;
};

void append(std::string& key, int64_t number) {
  key.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// All that the shapes of the results depend on. False: a value that cannot be written down.
bool describe(std::string& key, const c10::IValue& value) {
  append(key, value.isTensor() ? 1 : value.isNone() ? 2 : value.isInt() ? 3 : value.isBool() ? 4
             : value.isDouble() ? 5 : value.isIntList() ? 6 : value.isDevice() ? 7
             : value.isTensorList() ? 8 : value.isOptionalTensorList() ? 9
             : value.isGenerator() ? 10 : value.isString() ? 11 : 12);
  auto tensor = [&](const at::Tensor& t) {
    append(key, t.defined() ? t.dim() : -1);
    if (t.defined()) {
      append(key, int64_t(t.scalar_type()) * 2 + t.unsafeGetTensorImpl()->is_wrapped_number());
      for (auto n : t.sizes())
        append(key, n);
      for (auto n : t.strides())
        append(key, n);
    }
    return t;
  };
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    if (!value.isTensor())
      append(key, value.toListRef().size());
    map_tensors(value, tensor);
  } else if (value.isInt()) {
    append(key, value.toInt());
  } else if (value.isBool()) {
    append(key, value.toBool());
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    key.append(reinterpret_cast<const char*>(&number), sizeof number);
  } else if (value.isIntList()) {
    const auto list = value.toIntList();
    append(key, list.size());
    for (int64_t n : list)
      append(key, n);
  } else if (value.isString()) {
    key += value.toStringRef() + '\0';
  } else if (!value.isNone() && !value.isDevice() && !value.isGenerator()) {
    return false;
  }
  return true;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!tensor.defined())
    return tensor;
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    // A Python number comes as a CPU tensor, and torch wants it so on every device. A copy, because
    // a meta kernel in Python ties it to a Python object, and to free that takes Python's lock: a
    // stream's thread must never wait for the lock of a host that waits for the stream.
    auto number = tensor.clone();
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return number;
  }
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
          c10::DataPtr(nullptr, c10::kMeta), c10::GetAllocator(c10::kMeta), true),
      c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

std::vector<Geometry> geometries(const c10::IValue& value) {
  std::vector<Geometry> all;
  map_tensors(value, [&](const at::Tensor& tensor) {
    all.emplace_back(tensor);
    return tensor;
  });
  return all;
}

// Runs the operator on tensors without bytes. Any error means "unknown": the operator then runs
// while the host waits, and either works or raises the CPU's own error.
Shapes shapes_by_meta(
    const c10::OperatorHandle& op, const OpInfo& info, const std::vector<c10::IValue>& arguments) {
  Shapes shapes;
  if (!info.returns_tensors)
    return shapes;
  Stack stack;
  for (const auto& value : arguments) {
    if (value.isDevice())
      stack.emplace_back(Device(c10::kMeta));
    else if (value.isGenerator())
      stack.emplace_back();
    else
      stack.push_back(map_tensors(value, as_meta));
  }
  std::vector<c10::IValue> written;
  for (size_t i = 0; i < stack.size(); ++i)
    if (info.written[i])
      written.push_back(stack[i]);
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    py::gil_scoped_acquire gil; // an error of a kernel in Python leaves Python's error set
    PyErr_Clear();
    return shapes;
  }
  shapes.known = true;
  for (const auto& value : stack)
    shapes.returns.push_back(geometries(value));
  for (const auto& value : written)
    shapes.written.push_back(geometries(value));
  return shapes;
}

const Shapes& shapes_of(
    const c10::OperatorHandle& op, const OpInfo& info, const std::vector<c10::IValue>& arguments) {
  static thread_local std::unordered_map<std::string, Shapes> known;
  static thread_local Shapes once;
  static thread_local std::string key;
  key.clear();
  append(key, reinterpret_cast<int64_t>(&info));
  bool complete = true;
  for (const auto& value : arguments)
    complete = complete && describe(key, value);
  if (!complete)
    return once = shapes_by_meta(op, info, arguments);
  auto found = known.find(key);
  if (found == known.end()) {
    if (known.size() > 100000)
      known.clear();
    std::string kept = key; // a meta kernel may come back here
    found = known.emplace(std::move(kept), shapes_by_meta(op, info, arguments)).first;
  }
  return found->second;
}

// One call of an operator on the card.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), info_(info_of(op)), stack_(stack),
        arguments_(torch::jit::last(*stack, info_.written.size()).vec()) {}

  void run() {
    const c10::DeviceGuard guard(device_ = find_device());
    if (info_.is_view)
      return run_view();
    const int64_t start = enqueue_clock_ns();
    for (size_t i = 0; i < arguments_.size(); ++i)
      arguments_[i] = checked(arguments_[i], info_.written[i]);
    const Shapes& shapes = shapes_of(op_, info_, arguments_);
    if (shapes.known)
      run_later(shapes);
    else
      run_now();
    enqueue_ns.fetch_add(enqueue_clock_ns() - start);
  }

 private:
  Device find_device() const {
    std::optional<Device> device;
    for (const auto& value : arguments_) {
      map_tensors(value, [&](const at::Tensor& tensor) {
        if (!device && is_card(tensor))
          device = tensor.device();
        return tensor;
      });
    }
    for (const auto& value : arguments_)
      if (!device && value.isDevice() && value.toDevice().has_index())
        device = value.toDevice();
    return device.value_or(Device(CARD, current_device));
  }

  // The rules of CUDA: numbers may come from the host, indices too; all else is on one device.
  c10::IValue checked(const c10::IValue& value, bool written) const {
    return map_tensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.device() == device_)
        return tensor;
      if (tensor.is_cpu() && !written && tensor.dim() == 0)
        // A user may change the number before the kernel runs.
        return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
      if (tensor.is_cpu() && value.isOptionalTensorList())
        return tensor.to(device_);
      TORCH_CHECK(false, op_.schema().operator_name(), ": expected all tensors to be on the same "
                  "device, but found ", device_, " and ", tensor.device());
    });
  }

  // The arguments as the kernel gets them.
  Stack for_kernel(Aliases& aliases) const {
    Stack made;
    made.reserve(arguments_.size());
    for (const auto& value : arguments_) {
      if (value.isDevice())
        made.emplace_back(Device(c10::kCPU));
      else if (value.isTensor() && !is_card(value.toTensor()))
        made.push_back(value);
      else
        made.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
          return is_card(tensor) ? aliases.of(tensor) : tensor;
        }));
    }
    return made;
  }

  // Enqueues; a random operator also waits for the one before it, so that seeds work.
  uint64_t enqueue(Stack& kernel_arguments, const std::function<void()>& work) {
    const Fate fate = decide(KERNEL, 0);
    Queue& queue = current_queue(device_.index());
    if (info_.generator < 0)
      return noted(queue, queue.push(work, fate));
    const auto& given = arguments_[info_.generator];
    const at::Generator generator =
        given.isGenerator() ? given.toGenerator() : default_generator(device_.index());
    auto* card = dynamic_cast<CardGenerator*>(generator.unsafeGetGeneratorImpl());
    TORCH_CHECK(card, "expected a slowcard generator, but found one of ", generator.device());
    kernel_arguments[info_.generator] = card->cpu;
    std::lock_guard<std::mutex> lock(card->mutex_);
    if (card->last_queue)
      queue.follow(*card->last_queue);
    card->last_queue = &queue;
    return card->last_ticket = noted(queue, queue.push(work, fate));
  }

  uint64_t noted(Queue& queue, uint64_t ticket) const {
    if (!races.is_on && !recording)
      return ticket;
    for (size_t i = 0; i < arguments_.size(); ++i)
      map_tensors(arguments_[i], [&](const at::Tensor& tensor) {
        note_access(queue, ticket, tensor, info_.written[i], op_.schema().name());
        return tensor;
      });
    for (const auto& value : made_)
      map_tensors(value, [&](const at::Tensor& tensor) {
        note_access(queue, ticket, tensor, true, op_.schema().name());
        return tensor;
      });
    return ticket;
  }

  void finish(Stack results) {
    torch::jit::drop(*stack_, arguments_.size());
    for (auto& value : results)
      stack_->push_back(std::move(value));
  }

  // The results' shapes are known: allocate them, enqueue, return at once.
  void run_later(const Shapes& shapes) {
    size_t w = 0;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!info_.written[i])
        continue;
      size_t t = 0;
      const auto& wanted = shapes.written[w++];
      map_tensors(arguments_[i], [&](const at::Tensor& tensor) {
        const auto& geometry = wanted[t++];
        if (geometry.defined && tensor.sizes() != at::IntArrayRef(geometry.sizes))
          set_geometry(tensor.unsafeGetTensorImpl(), geometry.sizes, geometry.strides);
        return tensor;
      });
    }
    Aliases aliases;
    auto kernel = std::make_shared<Stack>(for_kernel(aliases));
    auto targets = std::make_shared<Stack>();
    Stack results;
    for (size_t r = 0; r < info_.returned.size(); ++r) {
      if (info_.returned[r] >= 0) {
        results.push_back(arguments_[info_.returned[r]]);
        targets->emplace_back();
        continue;
      }
      c10::List<at::Tensor> made, seen;
      for (const auto& geometry : shapes.returns[r]) {
        made.push_back(
            geometry.defined ? empty_strided(
                                   geometry.sizes, geometry.strides,
                                   c10::typeMetaToScalarType(geometry.dtype), {}, device_)
                             : at::Tensor());
        seen.push_back(aliases.of(made.get(made.size() - 1)));
      }
      const bool is_list =
          op_.schema().returns()[r].type()->kind() == c10::TypeKind::ListType;
      results.push_back(is_list ? c10::IValue(made) : c10::IValue(made.get(0)));
      made_.push_back(results.back());
      targets->emplace_back(seen);
    }
    enqueue(*kernel, [op = op_, kernel, targets, n = at::get_num_threads()] {
      KernelScope scope(n);
      Stack values = *kernel; // a graph runs it again
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
      for (size_t r = 0; r < targets->size(); ++r) {
        if ((*targets)[r].isNone())
          continue;
        size_t t = 0;
        const auto into = (*targets)[r].toTensorVector();
        map_tensors(values[r], [&](const at::Tensor& result) {
          const auto& target = into[t++];
          if (!result.defined() || (result.numel() == 0 && target.defined()))
            return result; // the CPU leaves this result out, as batch norm does outside training
          TORCH_CHECK(target.sizes() == result.sizes(), op.schema().operator_name(),
                      ": the meta kernel promised another shape");
          target.copy_(result);
          return result;
        });
      }
    });
    finish(std::move(results));
  }

  // The results' shapes depend on data (or nobody knows them): the host waits.
  void run_now() {
    announce_wait(c10::toString(op_.schema().operator_name()));
    Aliases aliases;
    auto kernel = std::make_shared<Stack>(for_kernel(aliases));
    Stack fresh(arguments_.size()); // results that the kernel may resize
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (info_.written[i] && arguments_[i].isTensor() && is_card(arguments_[i].toTensor()) &&
          arguments_[i].toTensor().numel() == 0)
        (*kernel)[i] = fresh[i] =
            at::empty({0}, arguments_[i].toTensor().options().device(c10::kCPU));
    auto failure = std::make_shared<std::exception_ptr>();
    Queue& queue = current_queue(device_.index());
    const auto ticket =
        enqueue(*kernel, [op = op_, kernel, failure, n = at::get_num_threads()] {
          KernelScope scope(n);
          try {
            op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), kernel.get());
          } catch (...) {
            *failure = std::current_exception();
          }
        });
    host_waits(queue, ticket, queue.clock);
    if (*failure)
      std::rethrow_exception(*failure);
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (fresh[i].isNone())
        continue;
      const auto& made = fresh[i].toTensor();
      resize_(arguments_[i].toTensor(), made.sizes(), std::nullopt);
      give_to_card(arguments_[i].toTensor(), made);
    }
    Stack results;
    for (size_t r = 0; r < info_.returned.size(); ++r) {
      if (info_.returned[r] >= 0)
        results.push_back(arguments_[info_.returned[r]]);
      else
        results.push_back(map_tensors((*kernel)[r], [&](const at::Tensor& result) {
          if (!result.defined())
            return result;
          auto made = empty_strided(
              result.sizes(), result.strides(), result.scalar_type(), {}, device_);
          give_to_card(made, result);
          return made;
        }));
    }
    finish(std::move(results));
  }

  // Part of a kernel, not a copy of the user's: neither counted nor delayed.
  void give_to_card(const at::Tensor& target, const at::Tensor& source) const {
    Aliases aliases;
    const int threads = at::get_num_threads();
    Queue& queue = current_queue(device_.index());
    const auto ticket = queue.push([to = aliases.of(target), source, threads] {
      KernelScope scope(threads);
      to.copy_(source);
    });
    note_access(queue, ticket, target, true, op_.schema().name());
  }

  // A view reads no data: the CPU's kernel computes it on the host, from sizes and strides alone.
  void run_view() {
    Aliases aliases;
    Stack kernel = for_kernel(aliases);
    const at::Tensor& base = arguments_[0].toTensor();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &kernel);
    }
    Stack results;
    for (const auto& value : kernel)
      results.push_back(
          map_tensors(value, [&](const at::Tensor& view) { return aliases.back(view, base); }));
    finish(std::move(results));
  }

  const c10::OperatorHandle& op_;
  const OpInfo& info_;
  Stack* stack_;
  std::vector<c10::IValue> arguments_, made_;
  Device device_{CARD, 0};
};

void run_operator(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// ------------------------------------------------------------------ torch's interfaces

struct Event {
  Queue* queue = nullptr;
  uint64_t ticket = 0;
  std::shared_ptr<std::atomic<int64_t>> time{}; // ns; only with timing
  Clock clock{}; // of the stream when it was recorded
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CARD; }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(CARD, current_device); }
  void setDevice(Device device) const override {
    if (!device.has_index())
      return;
    check_device(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(Device device) const override {
    const auto index = device.has_index() ? device.index() : current_device;
    check_device(index);
    return stream_of(index, current_ids[index]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return stream_of(device.has_index() ? device.index() : current_device, 0);
  }
  c10::Stream getNewStream(Device device, int = 0) const override {
    const auto index = device.has_index() ? device.index() : current_device;
    check_device(index);
    return stream_of(index, 1 + cards[index].next.fetch_add(1) % POOL_STREAMS);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_ids[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream);
    if (!queue.reached(queue.last()))
      return false;
    host_knows(queue.clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream);
    announce_wait("stream.synchronize");
    host_waits(queue);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    check_device(device);
    announce_wait("synchronize");
    {
      WithoutGil released;
      wait_for_card(device);
    }
    raise_pending_error();
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    card_allocator->recordStream(ptr, stream);
  }

  void record(
      void** event, const c10::Stream& stream, const DeviceIndex,
      const c10::EventFlag flag) const override {
    auto* e = static_cast<Event*>(*event ? *event : *event = new Event);
    e->queue = &queue_of(stream);
    e->time = nullptr;
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      e->time = std::make_shared<std::atomic<int64_t>>(0);
      e->queue->push([time = e->time] { time->store(now_ns()); });
    }
    e->ticket = e->queue->last();
    e->clock = e->queue->clock;
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* e = static_cast<Event*>(event);
    if (e)
      queue_of(stream).follow(*e->queue, e->ticket, e->clock);
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    if (e && !e->queue->reached(e->ticket))
      return false;
    if (e)
      host_knows(e->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (auto* e = static_cast<Event*>(event)) {
      announce_wait("event.synchronize");
      host_waits(*e->queue, e->ticket, e->clock);
    }
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto *a = static_cast<Event*>(first), *b = static_cast<Event*>(second);
    TORCH_CHECK(a && b, "both events must be recorded before their elapsed time is asked for");
    TORCH_CHECK(a->time && b->time, "both events must be made with enable_timing=True");
    TORCH_CHECK(queryEvent(a) && queryEvent(b), "both events must be completed");
    return double(b->time->load() - a->time->load()) / 1e6;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({CARD, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({CARD, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return pinned->find(data) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator; }
  Device getDeviceFromPtr(void* data) const override {
    return Device(CARD, (static_cast<char*>(data) - forbidden) / SPAN);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<CardGenerator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

// Attention takes the same path as on the CPU. The choice looks at (perhaps symbolic) shapes alone,
// and dispatches nothing: the tensors may be the fake ones of a compiler.
int64_t fused_sdp_choice(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, double dropout, bool causal,
    std::optional<double> scale, bool gqa) {
  return at::native::_fused_sdp_choice_cpp(q, k, v, mask, dropout, causal, scale, gqa);
}

void register_everything() {
  reserve_addresses();
  for (int device = 0; device < MAX_DEVICES; ++device) {
    pools[device] = new Pool(forbidden + device * SPAN, device);
    pools[device]->capacity = 4ULL << 30;
  }
  pinned = new Pool(nullptr, -1);
  c10::SetAllocator(CARD, card_allocator);
  at::setHostAllocator(CARD, pinned_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(nullptr, nullptr, [] { forked = true; });

  static auto* aten = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  aten->impl("empty.memory_format", TORCH_FN(empty_memory_format));
  aten->impl("empty_strided", [](at::IntArrayRef size, at::IntArrayRef stride,
                                 std::optional<at::ScalarType> dtype,
                                 std::optional<at::Layout> layout, std::optional<Device> device,
                                 std::optional<bool> pin) {
    return empty_strided(size, stride, dtype, layout, device, pin);
  });
  aten->impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten->impl("view", TORCH_FN(at::native::view));
  aten->impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten->impl("resize_", TORCH_FN(resize_));
  aten->impl("set_", TORCH_FN(set_nothing));
  aten->impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  aten->impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  aten->impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  aten->impl("copy_", TORCH_FN(copy_));
  aten->impl("_copy_from", [](const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    at::Tensor target = to;
    return copy_(target, from, non_blocking);
  });
  aten->impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  aten->impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
    card_allocator->recordStream(self.storage().data_ptr(), stream);
  });
  aten->impl("_fused_sdp_choice", TORCH_FN(fused_sdp_choice));
  // As on CUDA: `cpu_parameter.data = device_tensor` keeps the parameter and changes its device.
  aten->impl("_has_compatible_shallow_copy_type", [](const at::Tensor& a, const at::Tensor& b) {
    return a.layout() == c10::kStrided && b.layout() == c10::kStrided;
  });

  aten->impl("native_dropout", TORCH_FN(native_dropout));
  // CUDA counts integers too, and libraries know that; the CPU's kernel does not.
  aten->impl("histc", [](const at::Tensor& self, int64_t bins, const at::Scalar& min,
                         const at::Scalar& max) {
    const bool is_integer = c10::isIntegralType(self.scalar_type(), false);
    const auto counted = is_integer ? self.to(c10::kDouble) : self;
    auto made = at::empty({bins}, counted.options());
    at::histc_out(made, counted, bins, min, max);
    return made.to(self.scalar_type());
  });

  // Wherever the CPU has a kernel of its own, that very kernel runs: torch's decompositions, which
  // the dispatcher would prefer for a foreign device, may round differently.
  const auto boxed = [] { return torch::CppFunction::makeFromBoxedFunction<&run_operator>(); };
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0)
      continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    // The composite convolution looks at the device to choose a backend.
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || name.name == "aten::convolution")
      aten->impl(c10::toString(name).substr(6).c_str(), boxed());
  }
  static auto* rest = new torch::Library(
      torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  rest->fallback(boxed());
}

Kind kind_named(const std::string& name) {
  for (int kind = 0; kind < NUM_KINDS; ++kind)
    if (name == KIND_NAMES[kind])
      return Kind(kind);
  TORCH_CHECK_VALUE(false, "no such kind: ", name);
}

py::dict counters() {
  py::dict made;
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    made[py::str(KIND_NAMES[kind])] = switches[kind].count.load();
    made[py::str(std::string(KIND_NAMES[kind]) + "_bytes")] = switches[kind].bytes.load();
    made[py::str(std::string(KIND_NAMES[kind]) + "_delayed_ns")] =
        switches[kind].delayed_ns.load();
  }
  made["enqueue_ns"] = enqueue_ns.load();
  made["syncs"] = num_syncs.load();
  std::lock_guard<std::mutex> lock(sync_mutex);
  made["syncs_by_reason"] = syncs_by_reason;
  return made;
}

void reset_counters() {
  for (auto& s : switches)
    s.count = 0, s.bytes = 0, s.delayed_ns = 0;
  enqueue_ns = 0, num_syncs = 0;
  std::lock_guard<std::mutex> lock(sync_mutex);
  syncs_by_reason.clear();
}

} // namespace slowcard

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &slowcard::fused_sdp_choice)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace slowcard;
  register_everything();
  m.def("set_num_devices", [](int count) {
    TORCH_CHECK_VALUE(count >= 0 && count <= MAX_DEVICES, "0 to ", MAX_DEVICES, " devices");
    num_devices = count;
  });
  m.def("current_device", [] { return int(current_device); });
  m.def("is_in_bad_fork", [] { return forked.load(); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("memory_info", [](int device) { return card_allocator->getMemoryInfo(device); });
  m.def("set_capacity", [](int device, size_t bytes) {
    pools.at(device)->capacity = std::min(bytes, SPAN);
  });
  m.def("set_delay", [](const std::string& kind, int64_t ns, int64_t random_ns, int64_t seed) {
    auto& s = switches[kind_named(kind)];
    s.delay_ns = ns, s.random_ns = random_ns, s.seed = seed, s.ordinal = 0;
  });
  m.def("set_stream_delay", [](int device, int64_t id, int64_t ns) {
    TORCH_CHECK_VALUE(device >= 0 && device < MAX_DEVICES, "no such device");
    cards[device].queues.at(id)->delay_ns = ns;
  });
  m.def("set_failure", [](const std::string& kind, int64_t nth, bool later) {
    auto& s = switches[kind_named(kind)];
    s.fail_later = later, s.fail_in = nth;
  });
  m.def("host_register", [](uintptr_t address, size_t bytes) {
    pinned->add_foreign(reinterpret_cast<char*>(address), bytes);
  });
  m.def("host_unregister", [](uintptr_t address) {
    return pinned->remove_foreign(reinterpret_cast<char*>(address));
  });
  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate").def("open", &Gate::open);
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("replay", &Graph::replay)
      .def("num_works", [](const Graph& graph) { return graph.works->size(); });
  m.def("hold", [](int device, int64_t id) {
    check_device(device);
    auto gate = std::make_shared<Gate>();
    cards[device].queues.at(id)->push([gate] { gate->pass(); });
    return gate;
  });
  m.def("check_races", [](bool on) {
    py::gil_scoped_release released;
    for (int device = 0; device < MAX_DEVICES; ++device)
      wait_for_card(device);
    races.start(on);
    if (on) // everything until here is over
      for (int device = 0; device < MAX_DEVICES; ++device)
        for (auto* queue : cards[device].queues)
          races.host[queue->index()] = queue->last();
  });
  m.def("races", [] {
    std::lock_guard<std::mutex> lock(races.mutex);
    return races.found;
  });
  m.def("sleep", [](int64_t ns) {
    current_queue(current_device).push([ns] {
      std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
    });
  });
  m.def("counters", &counters);
  m.def("reset_counters", &reset_counters);
  m.def("time_enqueuing", [](bool on) { times_enqueuing = on; });
  m.def("set_sync_mode", [](int mode, py::object watcher) {
    Py_XDECREF(sync_watcher);
    sync_watcher = watcher.is_none() ? nullptr : watcher.release().ptr();
    sync_mode = mode;
  });
  m.def("settle", [] { // for the end of a process: nothing is under way, no error is shown
    py::gil_scoped_release released;
    for (int device = 0; device < MAX_DEVICES; ++device)
      wait_for_card(device);
    std::lock_guard<std::mutex> lock(error_mutex);
    pending_error.clear();
  });
}
