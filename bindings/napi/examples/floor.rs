//! The least that an answer out of another thread costs an event loop: npm/bench/run.mjs measures it beside Hob's own calls, so that what
//! they cost can be told from what Node-API and the loop do. An addon: a thread that is woken, and wakes the loop.

#![allow(unreachable_pub, missing_docs, clippy::missing_errors_doc, reason = "for the benchmark alone")]

use std::sync::mpsc::{Sender, channel};
use std::thread;

use napi::bindgen_prelude::Function;
use napi::threadsafe_function::ThreadsafeFunctionCallMode;
use napi_derive::napi;

/// A thread that calls `bell` in the event loop each time it is asked to.
#[napi]
pub struct Echo {
    ask: Sender<()>,
}

#[napi]
impl Echo {
    #[napi(constructor)]
    pub fn new(bell: Function<'_, (), ()>) -> napi::Result<Self> {
        let bell = bell.build_threadsafe_function::<()>().weak::<true>().build()?;
        let (ask, asked) = channel();
        thread::spawn(move || {
            for () in asked {
                bell.call((), ThreadsafeFunctionCallMode::NonBlocking);
            }
        });
        Ok(Self { ask })
    }

    #[napi]
    pub fn ask(&self) {
        // The thread lives as long as this.
        let _ = self.ask.send(());
    }
}
