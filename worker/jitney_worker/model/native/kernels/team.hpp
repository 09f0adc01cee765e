// Threads that walk through one piece of work together: all run the same function, share its loops out by taking the
// next index, and meet at barriers. Who computes what is left to chance; the results never depend on it.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace jitney {

constexpr int MAX_THREADS = 64;

class Team {
  public:
    explicit Team(int size) : size_(size < 1 ? 1 : size > MAX_THREADS ? MAX_THREADS : size) {
        pthread_mutex_init(&mutex_, nullptr);
        pthread_cond_init(&news_, nullptr);
        for (int i = 1; i < size_; ++i) {
            seats_[i] = {this, i};
            pthread_create(&threads_[i], nullptr, &Team::serve, &seats_[i]);
        }
    }

    ~Team() {
        announce(nullptr, nullptr);
        for (int i = 1; i < size_; ++i) pthread_join(threads_[i], nullptr);
        pthread_cond_destroy(&news_);
        pthread_mutex_destroy(&mutex_);
    }

    int size() const { return size_; }

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
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        // A thread that lost its core would be waited for with the other core at full heat: after a while, let go.
        for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) spins < 4096 ? relax() : yield();
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

    void begin() {
        for (int i = 0; i < size_; ++i) taken_[i].count.store(0, std::memory_order_relaxed);
    }

    static void yield() { sched_yield(); }

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
        for (unsigned round = 0;; ++round) {
            team->await(round);
            if (team->call_ == nullptr) return nullptr;
            team->call_(team->self_, seat->thread);
            team->barrier();
        }
    }

    int size_;
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
};

}  // namespace jitney
