//! The pool's speed: a hit, a decision among many residents, a line of waiters. `cargo bench --bench pool`.
//!
//! Targets (issue 3): begin_use + end_use <= 150 ns on one thread and scaling to two cores; a decision among 10,000 residents
//! <= 20 microseconds; 1,000 waiters without quadratic cost.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hob::pool::{Admission, IdlePolicy, Key, LoadContext, Loaded, Pool, PoolOptions, Spawn};
use hob::{BoxFuture, Result};

/// Runs tasks when told to, on this thread: no thread hand-over in the figures.
#[derive(Clone, Default)]
struct Exec(Arc<Mutex<VecDeque<Arc<Task>>>>);

struct Task {
    future: Mutex<Option<BoxFuture<'static, ()>>>,
    queue: Exec,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let queue = self.queue.clone();
        queue.0.lock().unwrap().push_back(self);
    }
}

impl Spawn for Exec {
    fn spawn(&self, future: BoxFuture<'static, ()>) {
        Arc::new(Task { future: Mutex::new(Some(future)), queue: self.clone() }).wake();
    }
}

impl Exec {
    fn run(&self) {
        loop {
            let next = self.0.lock().unwrap().pop_front();
            let Some(task) = next else { return };
            let taken = task.future.lock().unwrap().take();
            if let Some(mut future) = taken {
                let waker = Waker::from(task.clone());
                if future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                    *task.future.lock().unwrap() = Some(future);
                }
            }
        }
    }
}

fn load(_: LoadContext) -> BoxFuture<'static, Result<Loaded>> {
    Box::pin(async { Ok(Loaded::unmeasured()) })
}

fn release(_: hob::pool::Token) -> BoxFuture<'static, Result<()>> {
    Box::pin(async { Ok(()) })
}

fn pool(budget: u64, idle: IdlePolicy) -> (Pool, Exec) {
    let exec = Exec::default();
    let mut options = PoolOptions::new(budget);
    options.spawner = Some(Arc::new(exec.clone()));
    options.idle = idle;
    options.max_waiting = 1 << 20;
    (Pool::new(options).unwrap(), exec)
}

fn admit(pool: &Pool, exec: &Exec, admission: Admission) {
    let mut future = Box::pin(pool.admit(admission, load, release));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => {
                drop(result.unwrap());
                return;
            }
            Poll::Pending => exec.run(),
        }
    }
}

fn residents(count: u64, idle: IdlePolicy) -> (Pool, Exec) {
    let (pool, exec) = pool(count * 10, idle);
    for index in 0..count {
        admit(&pool, &exec, Admission::new(Key::chat(format!("model-{index:06}")), 10));
    }
    (pool, exec)
}

fn hits(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("begin_use + end_use");
    for count in [1u64, 10, 10_000] {
        let (pool, _exec) = residents(count, IdlePolicy::default());
        let key = Key::chat(format!("model-{:06}", count / 2));
        group.bench_function(BenchmarkId::new("one thread, residents", count), |bencher| {
            bencher.iter(|| drop(black_box(pool.begin_use(black_box(&key)))));
        });
    }
    for threads in [1usize, 2, 8] {
        let (pool, _exec) = residents(8, IdlePolicy::default());
        group.throughput(Throughput::Elements(threads as u64));
        group.bench_function(BenchmarkId::new("threads, one key each", threads), |bencher| {
            // Each thread does all the iterations; the time of one is what a pair costs under that load.
            bencher.iter_custom(|iterations| {
                let barrier = std::sync::Barrier::new(threads + 1);
                std::thread::scope(|scope| {
                    for thread in 0..threads {
                        let (pool, barrier) = (&pool, &barrier);
                        scope.spawn(move || {
                            let key = Key::chat(format!("model-{:06}", thread % 8));
                            barrier.wait();
                            for _ in 0..iterations {
                                drop(black_box(pool.begin_use(&key)));
                            }
                            barrier.wait();
                        });
                    }
                    barrier.wait();
                    let started = Instant::now();
                    barrier.wait();
                    started.elapsed()
                })
            });
        });
    }
    group.finish();
}

fn decisions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decision");
    for count in [10u64, 100, 1_000, 10_000, 100_000] {
        let (pool, exec) = residents(count, IdlePolicy::default());
        let key = Key::chat("newcomer");
        group.bench_function(BenchmarkId::new("plan, full pool, residents", count), |bencher| {
            bencher.iter(|| black_box(pool.plan(&key, 15, None)));
        });
        let mut next = 0u64;
        group.bench_function(BenchmarkId::new("whole swap: admit, evict one, load, residents", count), |bencher| {
            bencher.iter(|| {
                next += 1;
                admit(&pool, &exec, Admission::new(Key::embedder(format!("{next}")), 10));
            });
        });
    }
    group.finish();
}

fn waiters(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("line");
    group.sample_size(10).measurement_time(Duration::from_secs(4));
    for count in [10u64, 100, 1_000, 10_000, 100_000] {
        group.throughput(Throughput::Elements(count));
        group.bench_function(BenchmarkId::new("stand in line and be served, waiters", count), |bencher| {
            bencher.iter_batched(
                || pool(10, IdlePolicy::Never),
                |(pool, exec)| {
                    let done = Arc::new(Mutex::new(0u64));
                    admit(&pool, &exec, Admission::new(Key::chat("first"), 10));
                    let lease = pool.begin_use(&Key::chat("first"));
                    for index in 0..count {
                        let future = pool.admit(Admission::new(Key::chat(format!("{index}")), 10), load, release);
                        let done = done.clone();
                        exec.spawn(Box::pin(async move {
                            future.await.unwrap();
                            *done.lock().unwrap() += 1;
                        }));
                    }
                    exec.run();
                    drop(lease);
                    exec.run();
                    assert_eq!(*done.lock().unwrap(), count);
                },
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

fn settings() -> Criterion {
    Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_millis(1_500)).sample_size(30)
}

criterion_group! { name = benches; config = settings(); targets = hits, decisions, waiters }
criterion_main!(benches);
