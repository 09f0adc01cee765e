// Threads that walk through one piece of work together: all run the same function, share its loops out by taking the
// next index, and meet at barriers. Who computes what is left to chance; the results never depend on it.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <atomic>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace jitney {

constexpr int MAX_THREADS = 64;
constexpr int SPINS = 4096;  // some 50 us: longer than the others need to end what they have in hand

class Team {
  public:
    explicit Team(int size) : size_(size < 1 ? 1 : size > MAX_THREADS ? MAX_THREADS : size) { hire(); }

    ~Team() {
        if (owner_ != getpid()) return;  // a child of fork() has none of these threads: it would wait for ever
        announce(nullptr, nullptr);
        for (int i = 1; i < size_; ++i) pthread_join(threads_[i], nullptr);
        pthread_cond_destroy(&news_);
        pthread_mutex_destroy(&mutex_);
        pthread_mutex_destroy(&callers_);
    }

    int size() const { return size_; }

    // Held by whoever computes: one caller at a time has the threads and the rooms.
    class Turn {
      public:
        explicit Turn(Team& team) : team_(team) {
            if (team.owner_ != getpid()) team.hire();
            pthread_mutex_lock(&team.callers_);
            keep_small_numbers(before_);
        }
        ~Turn() {
            restore(before_);
            pthread_mutex_unlock(&team_.callers_);
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;

      private:
        Team& team_;
        unsigned before_ = 0;
    };

    // Run work(thread) on every thread, the caller being thread 0; returns when all have done.
    template <class Work>
    void run(Work& work) {
        begin();
        if (size_ > 1) announce([](void* self, int thread) { (*static_cast<Work*>(self))(thread); }, &work);
        work(0);
        barrier();
    }

    // The next index below `count` that nobody has taken since the last barrier, or -1. Each thread goes through a
    // stretch of its own, so that it can fetch ahead what comes next; then it helps the others to end.
    int take(int thread, int count) {
        for (int i = 0; i < size_; ++i) {
            int owner = (thread + i) % size_;
            int first = (int)((long)count * owner / size_), end = (int)((long)count * (owner + 1) / size_);
            if (first + taken_[owner].count.load(std::memory_order_relaxed) >= end) continue;
            int index = first + taken_[owner].count.fetch_add(1, std::memory_order_relaxed);
            if (index < end) return index;
        }
        return -1;
    }

    // Everyone's writes before it are seen by everyone after it.
    void barrier() {
        if (size_ == 1) return begin();
        unsigned turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            begin();
            turn_.store(turn + 1);
            if (sleepers_.load() > 0) wake_all(turn_);
            return;
        }
        for (int spins = 0; spins < SPINS; ++spins, relax())
            if (turn_.load(std::memory_order_acquire) != turn) return;
        // Whoever is missing has lost its core to another program. A core that spins is no room for it, an idle one is.
        sleepers_.fetch_add(1);
        while (turn_.load() == turn) sleep_while(turn_, turn);
        sleepers_.fetch_sub(1);
    }

  private:
    struct Seat {
        Team* team;
        int thread;
    };
    struct alignas(64) Taken {
        std::atomic<int> count{0};
    };
    using Call = void (*)(void*, int);

    // As many threads as there can be: each that is missing would be waited for at the first barrier.
    void hire() {
        pthread_mutex_init(&mutex_, nullptr);
        pthread_mutex_init(&callers_, nullptr);
        pthread_cond_init(&news_, nullptr);
        round_.store(0), arrived_.store(0), turn_.store(0), sleepers_.store(0);
        owner_ = getpid();
        sigset_t all, before;  // signals are for the threads of the interpreter, but for those that a fault raises
        sigfillset(&all);
        sigdelset(&all, SIGSEGV), sigdelset(&all, SIGBUS), sigdelset(&all, SIGFPE), sigdelset(&all, SIGILL);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int hired = 1;
        for (; hired < size_; ++hired) {
            seats_[hired] = {this, hired};
            if (pthread_create(&threads_[hired], nullptr, &Team::serve, &seats_[hired]) != 0) break;
        }
        size_ = hired;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Some libraries tell the thread that loads them to take the smallest numbers for zero. A row's result would then
    // depend on which thread computed it.
    static void keep_small_numbers(unsigned& before) {
#if defined(__x86_64__)
        before = _mm_getcsr();
        _mm_setcsr(before & ~0x8040u);
#else
        (void)before;
#endif
    }

    static void restore(unsigned before) {
#if defined(__x86_64__)
        _mm_setcsr(before);
#else
        (void)before;
#endif
    }

    void begin() {
        for (int i = 0; i < size_; ++i) taken_[i].count.store(0, std::memory_order_relaxed);
    }

    // Until `word` is no longer `value`, or sooner.
    static void sleep_while(std::atomic<unsigned>& word, unsigned value) {
#if defined(__linux__)
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
        (void)word, (void)value, sched_yield();
#endif
    }

    static void wake_all(std::atomic<unsigned>& word) {
#if defined(__linux__)
        syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, MAX_THREADS, nullptr, nullptr, 0);
#else
        (void)word;
#endif
    }

    static void relax() {
#if defined(__x86_64__) || defined(__i386__)
        _mm_pause();
#endif
    }

    void announce(Call call, void* self) {
        pthread_mutex_lock(&mutex_);
        call_ = call;
        self_ = self;
        round_.fetch_add(1, std::memory_order_release);
        pthread_cond_broadcast(&news_);
        pthread_mutex_unlock(&mutex_);
    }

    // Steps follow each other closely: watch for a moment before sleeping, or each step would begin with a wake-up.
    void await(unsigned round) {
        for (int spins = 0; spins < 2048; ++spins) {
            if (round_.load(std::memory_order_acquire) != round) return;
            relax();
        }
        pthread_mutex_lock(&mutex_);
        while (round_.load(std::memory_order_acquire) == round) pthread_cond_wait(&news_, &mutex_);
        pthread_mutex_unlock(&mutex_);
    }

    static void* serve(void* given) {
        Seat* seat = static_cast<Seat*>(given);
        Team* team = seat->team;
        unsigned before;
        keep_small_numbers(before);
        for (unsigned round = 0;; ++round) {
            team->await(round);
            if (team->call_ == nullptr) return nullptr;
            team->call_(team->self_, seat->thread);
            team->barrier();
        }
    }

    int size_;
    pid_t owner_ = 0;
    pthread_mutex_t callers_;
    pthread_t threads_[MAX_THREADS];
    Seat seats_[MAX_THREADS];
    pthread_mutex_t mutex_;
    pthread_cond_t news_;
    Call call_ = nullptr;
    void* self_ = nullptr;
    std::atomic<unsigned> round_{0};
    Taken taken_[MAX_THREADS];
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> turn_{0};
    std::atomic<int> sleepers_{0};
};

}  // namespace jitney
