//! Hazard A47: a pool with a resident and a running countdown takes no processor time. Alone in its file, because it counts
//! the ticks of every pool thread of the process.
#![cfg(all(target_os = "linux", not(feature = "shuttle")))]
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use hob::pool::{Admission, Key, LoadContext, Loaded, Pool, PoolOptions};
use hob::{BoxFuture, Result};

#[test]
fn a47_a_pool_at_rest_takes_no_processor_time() {
    fn ticks(name: &str) -> u64 {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).ok())
            .filter(|stat| stat.contains(&format!("({name})")))
            .map(|stat| {
                let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
                fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
            })
            .sum()
    }
    let pool = Pool::new(PoolOptions::new(100)).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let inside = pool.clone();
    pool.spawn(async move {
        let load = |_: LoadContext| -> BoxFuture<'static, Result<Loaded>> { Box::pin(async { Ok(Loaded::unmeasured()) }) };
        let release = |_| -> BoxFuture<'static, Result<()>> { Box::pin(async { Ok(()) }) };
        let _ = sender.send(inside.admit(Admission::new(Key::chat("a"), 60), load, release).await.is_ok());
    });
    assert!(receiver.recv().unwrap());
    let before = ticks("hob-pool");
    // Some time passes in which the test works and the pool has nothing to do.
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        std::hint::spin_loop();
    }
    // A spinning thread would show about 30 ticks.
    assert!(ticks("hob-pool") - before < 5);
}
