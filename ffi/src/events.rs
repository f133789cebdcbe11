//! What happens in a pool, as a stream of events.

use std::ffi::c_void;
use std::pin::pin;
use std::sync::Arc;

use hob::engine::Engine;
use hob::pool::EventStream;
use hob::{Error, ErrorKind, Pool};
use parking_lot::Mutex;

use crate::boundary::{done, enter_shared, out, quiet};
use crate::buffer::{self, hob_buffer};
use crate::error::{HOB_END, HOB_OK, HOB_WOULD_BLOCK, hob_error, hob_status, nothing};
use crate::pool::hob_pool;
use crate::raw::{self, Counted, Held, castable};
use crate::wait::{Signal, UserData, hob_drop_fn, hob_waker_fn, host_waker};

/// What happens in a pool, from its subscription on. One owner: `hob_pool_events_free`. It keeps its pool alive.
pub struct hob_pool_events {
    _opaque: [u8; 0],
}

pub(crate) struct EventsInner {
    events: Mutex<EventStream>,
    signal: Arc<Signal>,
    _pool: (Pool, Option<Engine>),
}

castable!(hob_pool_events => EventsInner, Counted, crate::handle::HOB_HANDLE_POOL_EVENTS);

/// Subscribes to what happens from now on, holding at most `capacity` unread events; of more the oldest are lost, and how many is told.
/// The caller owns the handle. NULL for NULL. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_subscribe(pool: *const hob_pool, capacity: usize) -> *mut hob_pool_events {
    // SAFETY: as the header asks.
    quiet(nothing(), || {
        unsafe { raw::borrow(pool) }.map_or(nothing(), |inner| {
            let events = EventsInner {
                events: Mutex::new(inner.pool.events(capacity)),
                signal: Arc::default(),
                _pool: (inner.pool.clone(), inner.engine.clone()),
            };
            raw::give_counted(Arc::new(Held::new(events)))
        })
    })
}

/// Gets the next event as JSON: an object with `event` (`load_started`, `load_progress`, `loaded`, `load_failed`, `unload_started`,
/// `unloaded`, `waiting`, ...) and its fields, or with `missed`. `timeout_ms` and the statuses are those of `hob_stream_next`; HOB_END
/// follows the last event of a closed pool. The caller owns one count of `*out_json`. One thread at a time: another gets HOB_BUSY. Any
/// thread but Hob's own. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_events_next(
    events: *mut hob_pool_events,
    timeout_ms: i64,
    out_json: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(events, "events", out_error, |inner: &EventsInner| {
            out(out_json, "out_json")?;
            let Some(mut events) = inner.events.try_lock() else {
                return Err(Error::new(ErrorKind::Busy, "another thread is inside hob_pool_events_next of this subscription"));
            };
            let event = inner.signal.wait(timeout_ms, |context| {
                let next = pin!(events.next());
                next.poll(context)
            });
            match event {
                None => Ok(HOB_WOULD_BLOCK),
                Some(None) => Ok(HOB_END),
                Some(Some(event)) => done(out_json, buffer::json(&event)?),
            }
        })
    }
}

/// As `hob_stream_set_waker`. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_events_set_waker(
    events: *const hob_pool_events,
    waker: hob_waker_fn,
    user_data: *mut c_void,
    drop_user_data: hob_drop_fn,
    out_error: *mut *mut hob_error,
) -> hob_status {
    let data = UserData::new(user_data, drop_user_data);
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(events, "events", out_error, |inner: &EventsInner| {
            inner.signal.set_host(host_waker(waker, data));
            inner.signal.tell_host();
            Ok(HOB_OK)
        })
    }
}

/// Ends a subscription. NULL is allowed. Any thread, also within callbacks; not while another thread waits for its next event.
/// (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_events_free(events: *mut hob_pool_events) {
    quiet((), || {
        // SAFETY: as the header asks.
        if let Some(inner) = unsafe { raw::take_counted(events) } {
            inner.signal.set_host(None);
        }
    });
}
