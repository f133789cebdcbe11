//! Interleavings of the pool, model-checked with shuttle: every scenario runs under at least 10,000 schedules, chosen at
//! random and by PCT. Run with `cargo test --features shuttle --test pool_shuttle`; `HOB_SHUTTLE_SCHEDULES` raises the number.
//!
//! Each scenario ends with everything let go, every task of the pool awaited (a task that hangs is a deadlock shuttle
//! reports), the account recomputed, and the owner's table compared with it. Memory really held is checked against the
//! budget at every load.
#![cfg(feature = "shuttle")]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use hob::pool::{Admission, Admitted, IdlePolicy, Key, Lease, LoadContext, Loaded, NoRoom, Pool, PoolOptions, Spawn, Token};
use hob::{BoxFuture, CancelToken, Error, ErrorKind, FakeClock, Result};
use shuttle::future::{JoinHandle, block_on, yield_now};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread;

/// Spawns on shuttle's executor and keeps the handles, so that the end of a scenario can wait for all of them.
#[derive(Clone, Default)]
struct Tasks(Arc<Mutex<Vec<JoinHandle<()>>>>);

impl Spawn for Tasks {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        let handle = shuttle::future::spawn(task);
        self.0.lock().unwrap().push(handle);
    }
}

impl Tasks {
    fn finish(&self) {
        loop {
            let next = self.0.lock().unwrap().pop();
            match next {
                Some(handle) => block_on(handle).unwrap(),
                None => return,
            }
        }
    }
}

/// How a load or a release of the scenario behaves.
#[derive(Clone, Copy, PartialEq)]
enum Script {
    Good,
    Fails,
    PanicsAtOnce,
    PanicsLater,
}

/// The scenario's world: cheap to clone into its threads.
#[derive(Clone)]
struct World {
    pool: Pool,
    tasks: Tasks,
    clock: FakeClock,
    owner: Arc<Mutex<Owner>>,
    budget: u64,
}

#[derive(Default)]
struct Owner {
    table: BTreeMap<Token, u64>,
    /// Bytes held by loads under way and by engines; drains are instant.
    held: u64,
    loads: usize,
    released: usize,
    /// Whether `held` may exceed the budget (forced evicts leave engines with their lease holders).
    lax: bool,
}

// Unwinds without the panic hook, which shuttle uses to report failures.
fn scripted_panic() -> ! {
    std::panic::resume_unwind(Box::new("scripted"))
}

impl World {
    fn new(budget: u64) -> Self {
        Self::with(budget, |_| {})
    }

    fn with(budget: u64, change: impl FnOnce(&mut PoolOptions)) -> Self {
        let (tasks, clock) = (Tasks::default(), FakeClock::new());
        let mut options = PoolOptions::new(budget);
        options.idle = IdlePolicy::Never;
        options.clock = Some(Arc::new(clock.clone()));
        options.spawner = Some(Arc::new(tasks.clone()));
        options.drain = Some(Arc::new(|| Box::pin(yield_now())));
        change(&mut options);
        Self { pool: Pool::new(options).unwrap(), tasks, clock, owner: Arc::default(), budget }
    }

    fn admit(
        &self,
        admission: Admission,
        bytes: u64,
        load: Script,
        release: Script,
    ) -> impl Future<Output = Result<Admitted>> + Send + 'static + use<> {
        let (owner, budget) = (self.owner.clone(), self.budget);
        let load = move |context: LoadContext| -> BoxFuture<'static, Result<Loaded>> {
            if load == Script::PanicsAtOnce {
                scripted_panic();
            }
            Box::pin(async move {
                {
                    let mut owner = owner.lock().unwrap();
                    owner.loads += 1;
                    owner.held += bytes;
                    assert!(owner.lax || owner.held <= budget, "{} bytes are held under a budget of {budget}", owner.held);
                }
                let undo = |owner: &Mutex<Owner>| owner.lock().unwrap().held -= bytes;
                yield_now().await;
                if context.cancel.is_cancelled() {
                    undo(&owner);
                    return Err(Error::new(ErrorKind::Cancelled, "stopped as asked"));
                }
                match load {
                    Script::Good => {
                        owner.lock().unwrap().table.insert(context.token, bytes);
                        Ok(Loaded::unmeasured())
                    }
                    Script::Fails => {
                        undo(&owner);
                        Err(Error::new(ErrorKind::BadModel, "scripted"))
                    }
                    _ => {
                        undo(&owner);
                        scripted_panic()
                    }
                }
            })
        };
        let owner = self.owner.clone();
        let release = move |token: Token| -> BoxFuture<'static, Result<()>> {
            let let_go = move || {
                let mut owner = owner.lock().unwrap();
                let bytes = owner.table.remove(&token).unwrap();
                owner.held -= bytes;
                owner.released += 1;
            };
            if release == Script::PanicsAtOnce {
                let_go();
                scripted_panic();
            }
            Box::pin(async move {
                yield_now().await;
                let_go();
                match release {
                    Script::Good => Ok(()),
                    Script::Fails => Err(Error::new(ErrorKind::Io, "scripted")),
                    _ => scripted_panic(),
                }
            })
        };
        self.pool.admit(admission, load, release)
    }

    fn acquire(&self, key: &Key, bytes: u64) -> impl Future<Output = Result<Lease>> + Send + 'static + use<> {
        let admitted = self.admit(Admission::new(key.clone(), bytes).in_use(), bytes, Script::Good, Script::Good);
        async move { Ok(admitted.await?.lease.unwrap()) }
    }

    fn resident(&self, key: &Key, bytes: u64) {
        drop(block_on(self.acquire(key, bytes)).unwrap());
    }

    fn holds(&self, token: Token) -> bool {
        self.owner.lock().unwrap().table.contains_key(&token)
    }

    fn thread(&self, work: impl FnOnce(World) + Send + 'static) -> thread::JoinHandle<()> {
        let world = self.clone();
        thread::spawn(move || work(world))
    }

    /// Everything let go: the account and the owner agree, and nothing is left over.
    fn settle(&self) {
        self.tasks.finish();
        self.pool.check_account().unwrap();
        let status = self.pool.status();
        assert_eq!((status.pending_bytes, status.releasing_bytes, status.waiting), (0, 0, 0));
        assert!(status.entries.iter().all(|entry| entry.uses == 0), "a use was never ended");
        let owner = self.owner.lock().unwrap();
        assert_eq!(status.resident_bytes, owner.table.values().sum::<u64>(), "the owner holds what the pool counts");
        assert_eq!(status.resident_bytes, owner.held);
    }

    fn close(&self) {
        self.settle();
        let result = block_on(self.pool.close());
        assert!(result.is_ok() || self.owner.lock().unwrap().lax);
        self.tasks.finish();
        self.pool.check_account().unwrap();
        let status = self.pool.status();
        assert_eq!((status.used_bytes, status.entries.len()), (0, 0));
        assert_eq!(self.owner.lock().unwrap().held, 0);
    }
}

fn schedules() -> usize {
    std::env::var("HOB_SHUTTLE_SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(10_000)
}

fn explore(scenario: impl Fn() + Send + Sync + 'static) {
    let scenario = Arc::new(scenario);
    let mut config = shuttle::Config::new();
    config.silence_warnings = true;
    config.stack_size = 0x40000;
    let random = schedules() * 4 / 5;
    let body = scenario.clone();
    shuttle::Runner::new(RandomScheduler::new(random), config.clone()).run(move || body());
    shuttle::Runner::new(PctScheduler::new(3, schedules() - random), config).run(move || scenario());
}

fn coin() -> bool {
    use shuttle::rand::Rng;
    shuttle::rand::thread_rng().gen_bool(0.5)
}

fn pick(among: &[Script]) -> Script {
    use shuttle::rand::Rng;
    among[shuttle::rand::thread_rng().gen_range(0..among.len())]
}

fn a() -> Key {
    Key::chat("a")
}

fn b() -> Key {
    Key::embedder("b")
}

fn c() -> Key {
    Key::reranker("c")
}

#[test]
fn admit_admit_of_two_keys_that_fit_alone() {
    // A5, section 9: reservations see each other; both are served, one after the other.
    explore(|| {
        let world = World::new(10);
        let one = world.thread(|world| drop(block_on(world.acquire(&a(), 6)).unwrap()));
        let two = world.thread(|world| drop(block_on(world.acquire(&b(), 7)).unwrap()));
        one.join().unwrap();
        two.join().unwrap();
        world.close();
        assert!(world.pool.status().peak_used_bytes <= 10);
    });
}

#[test]
fn admit_admit_of_one_key_loads_once() {
    // A41, A36: joined, not loaded again.
    explore(|| {
        let world = World::new(10);
        let threads: Vec<_> = (0..3)
            .map(|_| {
                world.thread(|world| {
                    let lease = block_on(world.acquire(&a(), 6)).unwrap();
                    assert!(world.holds(lease.token()) && !lease.is_detached());
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        world.close();
        assert_eq!(world.owner.lock().unwrap().loads, 1);
    });
}

#[test]
fn three_models_room_for_one_all_finish() {
    // A27, A28: no deadlock, no starvation.
    explore(|| {
        let world = World::new(10);
        let threads: Vec<_> = [a(), b(), c()]
            .into_iter()
            .map(|key| {
                world.thread(move |world| {
                    for _ in 0..2 {
                        let lease = block_on(world.acquire(&key, 9)).unwrap();
                        assert!(world.holds(lease.token()));
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        world.close();
    });
}

#[test]
fn admit_evict_with_and_without_force() {
    // P10, P14, the tombstone of 1.3.
    explore(|| {
        let world = World::new(10);
        world.owner.lock().unwrap().lax = true;
        let force = coin();
        let admitting = world.thread(|world| match block_on(world.acquire(&a(), 6)) {
            Ok(lease) => assert!(lease.is_detached() || world.holds(lease.token())),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled),
        });
        let evicting = world.thread(move |world| {
            if let Err(error) = block_on(world.pool.evict(&a(), force)) {
                assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InUse), "{error}");
                assert!(!force || error.kind() == ErrorKind::NotFound);
            }
        });
        let third = world.thread(|world| drop(block_on(world.acquire(&b(), 6)).unwrap()));
        for thread in [admitting, evicting, third] {
            thread.join().unwrap();
        }
        world.close();
    });
}

#[test]
fn evict_begin_use_never_both() {
    // A1, P14(b): a use begun is a use of something the pool counts.
    explore(|| {
        let world = World::new(10);
        world.resident(&a(), 6);
        let evicting = world.thread(|world| match block_on(world.pool.evict(&a(), false)) {
            Ok(evicted) => assert!(evicted.token.is_some()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::InUse),
        });
        let using = world.thread(|world| {
            if let Some(lease) = world.pool.begin_use(&a()) {
                assert!(world.holds(lease.token()));
                thread::yield_now();
                assert!(!lease.is_detached() && world.holds(lease.token()), "evicted in use");
            }
        });
        let again = world.thread(|world| {
            let lease = block_on(world.acquire(&a(), 6)).unwrap();
            assert!(world.holds(lease.token()));
        });
        for thread in [evicting, using, again] {
            thread.join().unwrap();
        }
        world.close();
        assert!(world.owner.lock().unwrap().loads <= 2);
    });
}

#[test]
fn sweep_begin_use_never_both() {
    // P19, I8: the timer's decision and the use are one order or the other.
    explore(|| {
        let world = World::with(10, |options| options.idle = IdlePolicy::AfterSeconds(30));
        world.resident(&a(), 6);
        world.clock.advance(Duration::from_secs(31));
        let sweeping = world.thread(|world| drop(block_on(world.pool.sweep()).unwrap()));
        let using = world.thread(|world| {
            if let Some(lease) = world.pool.begin_use(&a()) {
                thread::yield_now();
                assert!(!lease.is_detached() && world.holds(lease.token()), "swept in use");
            }
        });
        let admitting = world.thread(|world| drop(block_on(world.acquire(&b(), 6)).unwrap()));
        for thread in [sweeping, using, admitting] {
            thread.join().unwrap();
        }
        // The countdown of what is left must not hold the end of the test.
        world.pool.set_default_idle(IdlePolicy::Never);
        world.clock.advance(Duration::from_secs(100));
        world.close();
    });
}

#[test]
fn immediate_unload_at_the_end_of_the_last_use() {
    // I10, matrix row 8, against a use that begins at the same moment.
    explore(|| {
        let world = World::with(10, |options| options.idle = IdlePolicy::Immediately);
        let threads: Vec<_> = (0..3)
            .map(|_| {
                world.thread(|world| {
                    let lease = match world.pool.begin_use(&a()) {
                        Some(lease) => lease,
                        None => block_on(world.acquire(&a(), 6)).unwrap(),
                    };
                    assert!(!lease.is_detached() && world.holds(lease.token()));
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        world.tasks.finish();
        assert!(world.pool.status().entries.is_empty());
        world.close();
    });
}

#[test]
fn close_admit() {
    // Section 9: stop during load, stop with a parked request, stop twice.
    explore(|| {
        let world = World::new(10);
        world.owner.lock().unwrap().lax = true;
        let threads: Vec<_> = [(a(), 6), (b(), 7)]
            .into_iter()
            .map(|(key, bytes)| {
                world.thread(move |world| match block_on(world.acquire(&key, bytes)) {
                    Ok(lease) => assert!(lease.is_detached() || world.holds(lease.token())),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Closed, "{error}"),
                })
            })
            .collect();
        let closing = world.thread(|world| block_on(world.pool.close()).unwrap());
        block_on(world.pool.close()).unwrap();
        assert_eq!(world.owner.lock().unwrap().table.len(), 0, "close returned before everything was let go");
        for thread in threads {
            thread.join().unwrap();
        }
        closing.join().unwrap();
        world.close();
    });
}

/// Drops `future` after at most `polls` polls.
async fn at_most<T>(polls: usize, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    std::future::poll_fn(move |context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        if let Poll::Ready(value) = future.as_mut().poll(context) {
            return Poll::Ready(Some(value));
        }
        // Polled again at once, so that the drop can fall into any state of the flight.
        if polls < 100 {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await
}

#[test]
fn cancel_at_every_await() {
    // P43, D8: the admission's future is dropped after any number of polls, its token cancelled at any moment, while a
    // lease on another model makes it wait for room.
    explore(|| {
        let world = World::new(10);
        let lease = block_on(world.acquire(&b(), 7)).unwrap();
        let token = CancelToken::new();
        let dropped = world.thread(|world| {
            use shuttle::rand::Rng;
            let polls = shuttle::rand::thread_rng().gen_range(0..12);
            drop(block_on(at_most(polls, world.acquire(&a(), 6))));
        });
        let cancelled = {
            let token = token.clone();
            world.thread(move |world| {
                let admission = Admission::new(a(), 6).in_use().cancel(token);
                match block_on(world.admit(admission, 6, Script::Good, Script::Good)) {
                    Ok(admitted) => assert!(world.holds(admitted.token)),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled),
                }
            })
        };
        let ending = world.thread(move |_| drop(lease));
        token.cancel();
        for thread in [dropped, cancelled, ending] {
            thread.join().unwrap();
        }
        world.close();
    });
}

#[test]
fn joiners_leave_without_cancelling_the_shared_load() {
    // P43: only the last one to leave takes the load along.
    explore(|| {
        let world = World::new(10);
        let token = CancelToken::new();
        let stays = world.thread(|world| {
            let lease = block_on(world.acquire(&a(), 6)).expect("another's leaving must not end this");
            assert!(world.holds(lease.token()));
        });
        let leaves = {
            let token = token.clone();
            world.thread(move |world| {
                let admission = Admission::new(a(), 6).cancel(token);
                let _ = block_on(world.admit(admission, 6, Script::Good, Script::Good));
            })
        };
        token.cancel();
        stays.join().unwrap();
        leaves.join().unwrap();
        world.close();
    });
}

#[test]
fn load_failure_and_panic_at_every_point() {
    // P47, case 10: the reservation goes, waiters go on, the key can be tried again.
    explore(|| {
        let world = World::new(10);
        world.resident(&c(), 5);
        let script = pick(&[Script::Fails, Script::PanicsAtOnce, Script::PanicsLater]);
        let threads: Vec<_> = (0..2)
            .map(|_| {
                world.thread(move |world| {
                    let admission = Admission::new(a(), 6).in_use();
                    let error = block_on(world.admit(admission, 6, script, Script::Good)).unwrap_err();
                    let expected = if script == Script::Fails { ErrorKind::BadModel } else { ErrorKind::Callback };
                    assert_eq!(error.kind(), expected);
                })
            })
            .collect();
        let waiting = world.thread(|world| drop(block_on(world.acquire(&b(), 7)).unwrap()));
        for thread in threads {
            thread.join().unwrap();
        }
        waiting.join().unwrap();
        drop(block_on(world.acquire(&a(), 6)).unwrap());
        world.close();
    });
}

#[test]
fn release_failure_and_panic() {
    // Section 9: the entry is gone, the error is told, the pool goes on.
    explore(|| {
        let world = World::new(10);
        world.owner.lock().unwrap().lax = true;
        let script = pick(&[Script::Fails, Script::PanicsAtOnce, Script::PanicsLater]);
        block_on(world.admit(Admission::new(a(), 6), 6, Script::Good, script)).unwrap();
        let evicting = world.thread(|world| {
            if let Err(error) = block_on(world.pool.evict(&a(), false)) {
                assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Io | ErrorKind::Callback), "{error}");
            }
        });
        let admitting = world.thread(|world| drop(block_on(world.acquire(&b(), 7)).unwrap()));
        evicting.join().unwrap();
        admitting.join().unwrap();
        assert_eq!(world.pool.status().counters.failed_releases, 1);
        assert!(world.pool.begin_use(&a()).is_none());
        world.close();
    });
}

#[test]
fn pause_admit_resume() {
    // P48: no load runs while the pool is paused; an interrupted pause undoes itself.
    explore(|| {
        let world = World::new(10);
        world.resident(&b(), 6);
        let polls = if coin() { usize::MAX } else { 2 };
        let pausing = world.thread(move |world| {
            if let Some(paused) = block_on(at_most(polls, world.pool.pause())) {
                let paused = paused.unwrap();
                let loads = world.owner.lock().unwrap().loads;
                thread::yield_now();
                thread::yield_now();
                assert_eq!(world.owner.lock().unwrap().loads, loads, "a load started in a pause");
                assert!(world.pool.status().entries.iter().all(|entry| entry.state != hob::pool::EntryState::Loading));
                drop(paused);
            }
        });
        let admitting = world.thread(|world| drop(block_on(world.acquire(&a(), 6)).unwrap()));
        pausing.join().unwrap();
        admitting.join().unwrap();
        assert!(!world.pool.status().paused);
        world.close();
    });
}

#[test]
fn replace_forget_and_lease_ends() {
    // P22, P27: the old one's release never runs; leased bytes stay on the account until the last lease ends.
    explore(|| {
        let world = World::new(20);
        world.owner.lock().unwrap().lax = true;
        let lease = block_on(world.acquire(&a(), 6)).unwrap();
        let old = lease.token();
        let ending = world.thread(move |world| {
            drop(lease);
            world.pool.check_account().unwrap();
        });
        let replacing = world.thread(move |world| {
            let admission = Admission::new(a(), 7).replace();
            let admitted = block_on(world.admit(admission, 7, Script::Good, Script::Good)).unwrap();
            assert_ne!(admitted.token, old);
            // The owner lets the replaced engine go itself.
            let mut owner = world.owner.lock().unwrap();
            let bytes = owner.table.remove(&old).expect("the release of a replaced entry ran");
            owner.held -= bytes;
        });
        let using = world.thread(|world| drop(world.pool.begin_use(&a())));
        for thread in [ending, replacing, using] {
            thread.join().unwrap();
        }
        world.close();
    });
}

#[test]
fn the_policies_side_by_side() {
    // Wait, Refuse and LoadAnyway against one lease.
    explore(|| {
        let world = World::with(10, |options| options.physical_limit_bytes = Some(30));
        world.owner.lock().unwrap().lax = true;
        let lease = block_on(world.acquire(&c(), 7)).unwrap();
        let policies = [(a(), NoRoom::Wait), (b(), NoRoom::Refuse), (Key::other("onnx", "d"), NoRoom::LoadAnyway)];
        let threads: Vec<_> = policies
            .into_iter()
            .map(|(key, no_room)| {
                world.thread(move |world| {
                    let admission = Admission::new(key, 6).no_room(no_room);
                    let result = block_on(world.admit(admission, 6, Script::Good, Script::Good));
                    match no_room {
                        NoRoom::Refuse => assert!(result.map_or_else(|error| error.kind() == ErrorKind::BudgetExceeded, |_| true)),
                        _ => drop(result.unwrap()),
                    }
                })
            })
            .collect();
        drop(lease);
        for thread in threads {
            thread.join().unwrap();
        }
        world.close();
    });
}

// ---- uses counted without the mutex (loan.rs) ----

impl World {
    /// Leaves `key` resident, idle and lent: the next uses begin and end without the mutex.
    fn lent(&self, key: &Key, bytes: u64) {
        self.resident(key, bytes);
        drop(self.pool.begin_use(key).unwrap());
    }
}

#[test]
fn lent_uses_and_evict_never_both() {
    // Invariant 2 on the fast path: two uses race an evict and an admission that needs the room.
    explore(|| {
        let world = World::new(10);
        world.lent(&a(), 6);
        let evicts = coin();
        let users: Vec<_> = (0..2)
            .map(|_| {
                world.thread(|world| {
                    for _ in 0..2 {
                        if let Some(lease) = world.pool.begin_use(&a()) {
                            assert!(world.holds(lease.token()), "a use of what was let go");
                            thread::yield_now();
                            assert!(!lease.is_detached() && world.holds(lease.token()), "evicted in use");
                        }
                    }
                })
            })
            .collect();
        let other = world.thread(move |world| {
            if evicts {
                if let Err(error) = block_on(world.pool.evict(&a(), false)) {
                    assert_eq!(error.kind(), ErrorKind::InUse);
                }
            } else {
                drop(block_on(world.acquire(&b(), 7)).unwrap());
            }
        });
        for thread in users.into_iter().chain([other]) {
            thread.join().unwrap();
        }
        world.close();
    });
}

#[test]
fn the_end_of_a_lent_use_wakes_who_waits_for_room() {
    // No lost wake-up: whether the waiter comes before or after the last end, it is served. A lost one is a deadlock.
    explore(|| {
        let world = World::new(10);
        world.lent(&a(), 6);
        let leases = [world.pool.begin_use(&a()).unwrap(), world.pool.begin_use(&a()).unwrap()];
        let waiting = world.thread(|world| drop(block_on(world.acquire(&b(), 7)).unwrap()));
        let mut threads = vec![waiting];
        for lease in leases {
            threads.push(world.thread(move |world| {
                drop(lease);
                drop(world.pool.begin_use(&a()));
            }));
        }
        for thread in threads {
            thread.join().unwrap();
        }
        world.close();
    });
}

#[test]
fn lent_uses_are_counted_exactly() {
    // Every begin is a hit, every end ends one use, whoever looks meanwhile; an end too many is told.
    explore(|| {
        let world = World::new(20);
        world.lent(&a(), 6);
        world.lent(&b(), 6);
        let threads: Vec<_> = [a(), a(), b()]
            .into_iter()
            .map(|key| {
                world.thread(move |world| {
                    let lease = world.pool.begin_use(&key).unwrap();
                    let token = world.pool.begin_use_counted(&key).unwrap();
                    assert_eq!(token, lease.token());
                    assert!(world.pool.end_use(token));
                })
            })
            .collect();
        let looking = world.thread(|world| {
            for entry in world.pool.status().entries {
                assert!(entry.uses <= 4);
                assert!(world.pool.touch(&entry.key));
            }
            world.pool.check_account().unwrap();
        });
        for thread in threads.into_iter().chain([looking]) {
            thread.join().unwrap();
        }
        let token = world.pool.peek(&a()).unwrap();
        assert!(!world.pool.end_use(token));
        let counters = world.pool.status().counters;
        assert_eq!((counters.hits, counters.unbalanced_ends), (8, 1));
        world.close();
    });
}

#[test]
fn a_countdown_starts_at_the_end_of_a_lent_use() {
    // The timer was set when the entry was lent; it looks again at the true end and never takes an entry in use.
    explore(|| {
        let world = World::with(10, |options| options.idle = IdlePolicy::AfterSeconds(30));
        world.lent(&a(), 6);
        let using = world.thread(|world| {
            if let Some(lease) = world.pool.begin_use(&a()) {
                thread::yield_now();
                assert!(!lease.is_detached() && world.holds(lease.token()), "swept in use");
            }
        });
        let time = world.thread(|world| {
            world.clock.advance(Duration::from_secs(31));
            world.clock.advance(Duration::from_secs(31));
        });
        using.join().unwrap();
        time.join().unwrap();
        // Nobody asks any more: only the timer is left to unload it.
        let mut rounds = 0;
        while !world.owner.lock().unwrap().table.is_empty() {
            if world.clock.sleepers() > 0 {
                world.clock.advance(Duration::from_secs(31));
            }
            rounds += 1;
            assert!(rounds < 1_000, "no timer unloads it");
            thread::yield_now();
        }
        world.close();
        assert_eq!(world.pool.status().counters.idle_unloads, 1);
    });
}

#[test]
fn a_policy_of_immediately_reaches_lent_uses() {
    // Set while uses are open or about to begin: the last end unloads, and no entry is left behind.
    explore(|| {
        let world = World::new(10);
        world.lent(&a(), 6);
        let users: Vec<_> = (0..2)
            .map(|_| {
                world.thread(|world| {
                    if let Some(lease) = world.pool.begin_use(&a()) {
                        assert!(!lease.is_detached() && world.holds(lease.token()));
                    }
                })
            })
            .collect();
        world.pool.set_default_idle(IdlePolicy::Immediately);
        for thread in users {
            thread.join().unwrap();
        }
        world.tasks.finish();
        assert!(world.pool.status().entries.is_empty());
        world.close();
    });
}

#[test]
fn close_and_forget_under_lent_uses() {
    // Invariant 11: leases end whenever they like; the bytes stay on the account until the last one has.
    explore(|| {
        let world = World::new(10);
        world.owner.lock().unwrap().lax = true;
        world.lent(&a(), 6);
        let users: Vec<_> = (0..2).map(|_| world.thread(|world| drop(world.pool.begin_use(&a())))).collect();
        let forgets = coin();
        if forgets && let Some(bytes) = world.pool.forget(&a()) {
            assert_eq!(bytes, 6);
            let mut owner = world.owner.lock().unwrap();
            owner.table.clear();
            owner.held = 0;
        } else if !forgets {
            block_on(world.pool.close()).unwrap();
        }
        assert!(world.pool.begin_use(&a()).is_none());
        for thread in users {
            thread.join().unwrap();
        }
        world.close();
    });
}
