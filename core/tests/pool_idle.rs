//! Hazard: idle residency. The ten rows of spec 2.4, I1-I14, P19; A14, A31, A32, A35, A43.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use hob::pool::{Admission, EntryState, IdlePolicy, NoRoom};
use pool_support::*;
use proptest::prelude::*;

const AFTER_60: IdlePolicy = IdlePolicy::AfterSeconds(60);

fn unload_in(rig: &Rig, key: &hob::Key) -> Option<u64> {
    rig.status().entry(key).unwrap().unload_in_ms
}

// ---- the value ----

#[test]
fn i1_i2_i3_the_json_is_canonical_clamped_and_zero_is_immediately() {
    let cases = [
        (r#"{"mode":"immediately"}"#, IdlePolicy::Immediately, r#"{"mode":"immediately"}"#),
        (r#"{"mode":"never"}"#, IdlePolicy::Never, r#"{"mode":"never"}"#),
        (r#"{"mode":"never","seconds":5}"#, IdlePolicy::Never, r#"{"mode":"never"}"#),
        (r#"{"mode":"after_seconds","seconds":300}"#, IdlePolicy::AfterSeconds(300), r#"{"mode":"after_seconds","seconds":300}"#),
        (r#"{"mode":"after_seconds","seconds":300.0}"#, IdlePolicy::AfterSeconds(300), r#"{"mode":"after_seconds","seconds":300}"#),
        (r#"{"mode":"after_seconds","seconds":1}"#, IdlePolicy::AfterSeconds(30), r#"{"mode":"after_seconds","seconds":30}"#),
        (r#"{"mode":"after_seconds","seconds":0}"#, IdlePolicy::Immediately, r#"{"mode":"immediately"}"#),
        (
            r#"{"mode":"after_seconds","seconds":86401}"#,
            IdlePolicy::AfterSeconds(86_400),
            r#"{"mode":"after_seconds","seconds":86400}"#,
        ),
        (
            r#"{"mode":"after_seconds","seconds":99999999999999999999999}"#,
            IdlePolicy::AfterSeconds(86_400),
            r#"{"mode":"after_seconds","seconds":86400}"#,
        ),
    ];
    for (text, policy, canonical) in cases {
        assert_eq!(IdlePolicy::from_json(text), policy, "{text}");
        assert_eq!(policy.to_json(), canonical);
        assert_eq!(serde_json::to_string(&policy).unwrap(), canonical, "both writers agree");
        assert_eq!(serde_json::from_str::<IdlePolicy>(text).unwrap(), policy, "both readers agree");
    }
    assert_eq!(IdlePolicy::AfterSeconds(5).to_json(), r#"{"mode":"after_seconds","seconds":30}"#, "clamped on encode too");
}

#[test]
fn i4_i5_whatever_is_malformed_is_the_default_of_900_seconds() {
    assert_eq!(IdlePolicy::default(), IdlePolicy::AfterSeconds(900));
    let bad = [
        "",
        "null",
        "7",
        "[]",
        "{}",
        "\"never\"",
        r#"{"mode":7}"#,
        r#"{"mode":"soon"}"#,
        r#"{"mode":"after_seconds"}"#,
        r#"{"seconds":60}"#,
        r#"{"mode":"after_seconds","seconds":"60"}"#,
        r#"{"mode":"after_seconds","seconds":-1}"#,
        r#"{"mode":"after_seconds","seconds":null}"#,
        "{",
    ];
    for text in bad {
        assert_eq!(IdlePolicy::from_json(text), IdlePolicy::AfterSeconds(900), "{text}");
    }
}

proptest! {
    #[test]
    fn any_policy_survives_its_json(seconds in any::<u32>()) {
        let policy = IdlePolicy::AfterSeconds(seconds);
        prop_assert_eq!(IdlePolicy::from_json(&policy.to_json()), policy.normalized());
        prop_assert_eq!(policy.normalized().normalized(), policy.normalized());
        prop_assert_eq!(policy.ttl(), policy.normalized().ttl());
    }

    #[test]
    fn no_text_makes_the_reader_fail(text in ".{0,60}") {
        let policy = IdlePolicy::from_json(&text);
        prop_assert_eq!(policy, policy.normalized());
    }
}

// ---- the matrix of 2.4 ----

#[test]
fn row1_i6_the_timer_is_set_when_the_lease_ends_not_before() {
    let rig = Rig::new(100);
    let lease = rig.leased(&chat("a"), 10);
    rig.advance(secs(2_000));
    assert_eq!(unload_in(&rig, &chat("a")), None, "no countdown under a lease");
    drop(lease);
    assert_eq!(unload_in(&rig, &chat("a")), Some(900_000));
    rig.advance(secs(900));
    let pool = rig.pool.clone();
    assert!(rig.exec.start(async move { pool.sweep().await }).done().unwrap().evicted.is_empty());
    assert_eq!(rig.keys(), ["chat:a"], "exactly at its time it stays (P19, strictly greater)");
    rig.advance(std::time::Duration::from_millis(1));
    assert!(rig.keys().is_empty());
    assert_eq!(rig.memory.lock().unwrap().cache, 0, "and its memory is back (A14)");
}

#[test]
fn row2_i7_a_second_use_before_the_timeout_starts_the_countdown_anew() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    drop(rig.leased(&chat("a"), 10));
    rig.advance(secs(50));
    let lease = rig.pool.begin_use(&chat("a")).unwrap();
    rig.advance(secs(50));
    drop(lease);
    rig.advance(secs(60));
    assert_eq!(rig.keys(), ["chat:a"]);
    rig.advance(secs(1));
    assert!(rig.keys().is_empty());
    assert_eq!(rig.status().counters.idle_unloads, 1);
}

#[test]
fn row3_a_cancelled_request_counts_from_the_end_of_its_cleanup() {
    // The stream holds its lease until its cleanup is done; the pool's countdown starts there.
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    let token = hob::CancelToken::new();
    let lease = rig.leased(&chat("a"), 10);
    token.cancel();
    rig.advance(secs(100));
    assert_eq!(rig.keys(), ["chat:a"]);
    drop(lease);
    assert_eq!(unload_in(&rig, &chat("a")), Some(60_000));
}

#[test]
fn row4_the_timer_does_nothing_while_a_lease_is_held_and_a_later_release_schedules() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    drop(rig.leased(&chat("a"), 10));
    rig.run();
    let lease = rig.pool.begin_use(&chat("a")).unwrap();
    rig.advance(secs(500));
    assert_eq!(rig.keys(), ["chat:a"], "the timer fired and found a lease");
    drop(lease);
    rig.advance(secs(59));
    assert_eq!(rig.keys(), ["chat:a"]);
    rig.advance(secs(2));
    assert!(rig.keys().is_empty());
}

#[test]
fn row5_a_load_that_needs_the_room_wins_over_a_running_countdown() {
    // A pool with room for one is strict single-model residency.
    let rig = Rig::new(10);
    rig.resident(&chat("a"), 10);
    rig.resident(&chat("b"), 10);
    assert_eq!(rig.keys(), ["chat:b"]);
    assert_eq!(rig.status().counters.idle_unloads, 0);
    rig.advance(secs(901));
    assert!(rig.keys().is_empty());
    assert_eq!(rig.status().counters.idle_unloads, 1, "the countdown of the evicted one did nothing (I9)");
}

#[test]
fn row6_i11_each_model_has_its_own_countdown() {
    let rig = Rig::with(100, |options| options.idle = IdlePolicy::AfterSeconds(1_800));
    rig.resident(&chat("a"), 10);
    rig.advance(secs(600));
    rig.resident(&chat("b"), 10);
    rig.admit(Admission::new(chat("c"), 10).idle(AFTER_60)).done().unwrap();
    rig.advance(secs(61));
    assert_eq!(rig.keys(), ["chat:a", "chat:b"]);
    rig.advance(secs(1_200));
    assert_eq!(rig.keys(), ["chat:b"]);
    rig.advance(secs(601));
    assert!(rig.keys().is_empty());
}

#[test]
fn row7_i10_never_means_timers_do_nothing_and_the_rest_still_works() {
    let rig = Rig::with(100, never);
    rig.resident(&chat("a"), 60);
    rig.resident(&chat("b"), 30);
    rig.advance(secs(1_000_000));
    assert_eq!(rig.keys(), ["chat:a", "chat:b"]);
    assert_eq!(rig.clock.sleepers(), 0, "no timer runs (A47)");
    let pool = rig.pool.clone();
    rig.exec.start(async move { pool.evict(&chat("b"), false).await }).done().unwrap();
    rig.resident(&chat("c"), 60);
    assert_eq!(rig.keys(), ["chat:c"]);
}

#[test]
fn row8_i10_immediately_unloads_as_soon_as_the_last_lease_ends() {
    let rig = Rig::with(100, |options| options.idle = IdlePolicy::Immediately);
    let one = rig.leased(&chat("a"), 10);
    let two = rig.pool.begin_use(&chat("a")).unwrap();
    drop(one);
    rig.run();
    assert_eq!(rig.keys(), ["chat:a"]);
    drop(two);
    rig.run();
    assert!(rig.keys().is_empty());
}

#[test]
fn row8_a32_a_model_loaded_ahead_waits_for_its_first_use() {
    let rig = Rig::with(100, |options| options.idle = IdlePolicy::Immediately);
    rig.resident(&chat("a"), 10);
    rig.advance(secs(10_000));
    assert_eq!(rig.keys(), ["chat:a"]);
    drop(rig.pool.begin_use(&chat("a")));
    rig.run();
    assert!(rig.keys().is_empty());
}

#[test]
fn row9_i12_an_idle_unload_touches_no_file() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("prefix.kv"), b"saved").unwrap();
    drop(rig.leased(&chat("a"), 10));
    rig.advance(secs(61));
    assert!(rig.keys().is_empty());
    assert_eq!(std::fs::read(folder.path().join("prefix.kv")).unwrap(), b"saved");
}

#[test]
fn row10_i9_close_and_explicit_unload_win_over_timers() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    rig.resident(&chat("a"), 10);
    rig.run();
    assert_eq!(rig.clock.sleepers(), 1);
    let pool = rig.pool.clone();
    rig.exec.start(async move { pool.close().await }).done().unwrap();
    rig.run();
    assert_eq!(rig.clock.sleepers(), 0, "the timer has ended with the pool");
    rig.advance(secs(100));
    assert_eq!(rig.status().counters.idle_unloads, 0);
    assert_eq!(rig.log().iter().filter(|line| *line == "release chat:a").count(), 1);
}

// ---- the rest ----

#[test]
fn a31_a_long_use_is_followed_by_a_full_countdown() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    let lease = rig.leased(&chat("a"), 10);
    rig.advance(secs(600));
    drop(lease);
    rig.advance(secs(60));
    assert_eq!(rig.keys(), ["chat:a"]);
}

#[test]
fn a32_a_model_nobody_used_yet_stays_a_full_countdown() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    rig.resident(&chat("a"), 10);
    let pool = rig.pool.clone();
    rig.exec.start(async move { pool.sweep().await }).done().unwrap();
    rig.advance(secs(60));
    assert_eq!(rig.keys(), ["chat:a"]);
    rig.advance(secs(1));
    assert!(rig.keys().is_empty());
}

#[test]
fn a35_the_policy_of_the_last_use_rules_the_countdown_after_it() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    drop(rig.leased(&chat("a"), 10));
    drop(rig.pool.begin_use_with(&chat("a"), IdlePolicy::AfterSeconds(300)));
    assert_eq!(unload_in(&rig, &chat("a")), Some(300_000));
    drop(rig.pool.begin_use(&chat("a")));
    assert_eq!(unload_in(&rig, &chat("a")), Some(60_000), "a use without a wish is back to the model's own");
    drop(rig.pool.begin_use_with(&chat("a"), IdlePolicy::Never));
    assert_eq!(unload_in(&rig, &chat("a")), None);
    let admitted = rig.admit(Admission::new(chat("a"), 10).in_use().use_idle(IdlePolicy::AfterSeconds(90))).done().unwrap();
    drop(admitted.lease);
    assert_eq!(unload_in(&rig, &chat("a")), Some(90_000));
    drop(rig.pool.begin_use_with(&chat("a"), IdlePolicy::Immediately));
    rig.run();
    assert!(rig.keys().is_empty());
}

#[test]
fn a35_a_use_override_holds_for_a_cold_admission_too() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    let admitted = rig.admit(Admission::new(chat("a"), 10).in_use().use_idle(IdlePolicy::AfterSeconds(90))).done().unwrap();
    drop(admitted.lease);
    assert_eq!(unload_in(&rig, &chat("a")), Some(90_000));
}

#[test]
fn a43_the_models_own_policy_holds_whatever_path_loads_it() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    let own = IdlePolicy::AfterSeconds(120);
    rig.admit(Admission::new(chat("a"), 10).idle(own)).done().unwrap();
    assert_eq!(unload_in(&rig, &chat("a")), Some(120_000));
    let (gate, first) = rig.admit_gated(Admission::new(chat("b"), 10), true);
    let joined = rig.admit(Admission::new(chat("b"), 10).idle(own));
    rig.run();
    gate.open();
    first.done().unwrap();
    joined.done().unwrap();
    assert_eq!(unload_in(&rig, &chat("b")), Some(120_000));
    rig.admit(Admission::new(chat("a"), 10).idle(AFTER_60)).done().unwrap();
    assert_eq!(unload_in(&rig, &chat("a")), Some(60_000), "the last one wins");
}

#[test]
fn policies_can_be_changed_under_a_running_countdown() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    rig.resident(&chat("b"), 10);
    rig.run();
    assert!(rig.pool.set_idle(&chat("a"), Some(AFTER_60)));
    rig.advance(secs(61));
    assert_eq!(rig.keys(), ["chat:b"], "an earlier deadline wakes the timer earlier");
    rig.pool.set_default_idle(IdlePolicy::AfterSeconds(100));
    rig.advance(secs(40));
    assert!(rig.keys().is_empty());
    assert!(!rig.pool.set_idle(&chat("gone"), None));
}

#[test]
fn a_policy_already_over_unloads_when_it_is_set() {
    let rig = Rig::new(100);
    drop(rig.leased(&chat("a"), 10));
    rig.advance(secs(100));
    rig.pool.set_idle(&chat("a"), Some(AFTER_60));
    rig.run();
    assert!(rig.keys().is_empty());
    drop(rig.leased(&chat("b"), 10));
    rig.pool.set_idle(&chat("b"), Some(IdlePolicy::Immediately));
    rig.run();
    assert!(rig.keys().is_empty());
}

#[test]
fn i14_accelerating_shortens_running_countdowns_only() {
    let rig = Rig::new(100);
    rig.resident(&chat("idle"), 10);
    rig.admit(Admission::new(chat("kept"), 10).idle(IdlePolicy::Never)).done().unwrap();
    rig.admit(Admission::new(chat("soon"), 10).idle(IdlePolicy::AfterSeconds(30))).done().unwrap();
    let lease = rig.leased(&chat("used"), 10);
    rig.run();
    assert_eq!(rig.pool.accelerate_idle(secs(40)), 1);
    assert_eq!(unload_in(&rig, &chat("idle")), Some(40_000));
    assert_eq!(unload_in(&rig, &chat("soon")), Some(30_000));
    drop(lease);
    assert_eq!(unload_in(&rig, &chat("used")), Some(900_000));
    rig.advance(secs(41));
    assert_eq!(rig.keys(), ["chat:kept", "chat:used"]);
    assert_eq!(rig.pool.accelerate_idle(secs(10)), 1);
    drop(rig.pool.begin_use(&chat("used")));
    assert_eq!(unload_in(&rig, &chat("used")), Some(900_000), "a new use makes it void");
}

#[test]
fn a30_a_pinned_model_is_not_swept_and_counts_again_when_unpinned() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    rig.admit(Admission::new(chat("a"), 10).pinned()).done().unwrap();
    rig.advance(secs(1_000));
    assert_eq!(rig.keys(), ["chat:a"]);
    assert_eq!(unload_in(&rig, &chat("a")), None);
    assert!(rig.pool.unpin(&chat("a")));
    rig.run();
    assert!(rig.keys().is_empty(), "its time was over long ago");
}

#[test]
fn i8_the_timer_finds_the_entry_gone_or_replaced() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    rig.resident(&chat("a"), 10);
    rig.run();
    rig.pool.forget(&chat("a"));
    rig.advance(secs(30));
    rig.resident(&chat("a"), 20);
    rig.advance(secs(31));
    assert_eq!(rig.keys(), ["chat:a"], "the countdown of the one before must not unload the one after");
    assert_eq!(rig.status().used_bytes, 20);
}

#[test]
fn an_idle_release_in_the_background_lets_a_waiter_go_on() {
    let rig = Rig::with(100, |options| options.idle = AFTER_60);
    let _busy = rig.leased(&chat("busy"), 30);
    rig.resident(&chat("old"), 60);
    let waiting = rig.admit(Admission::new(chat("new"), 71).no_room(NoRoom::Wait));
    rig.run();
    assert!(!waiting.is_done());
    rig.advance(secs(61));
    assert!(!waiting.is_done(), "30 are still in use");
    assert!(rig.status().entry(&chat("new")).unwrap().state == EntryState::Waiting);
    let smaller = rig.pool.set_budget(101);
    smaller.unwrap();
    waiting.done().unwrap();
}

#[test]
fn one_timer_serves_all_and_sleeps_until_the_earliest() {
    let rig = Rig::new(1_000);
    for index in 0..20 {
        rig.admit(Admission::new(chat(&index.to_string()), 1).idle(IdlePolicy::AfterSeconds(200 - index))).done().unwrap();
    }
    rig.run();
    assert_eq!(rig.clock.sleepers(), 1);
    let earliest = rig.clock.next_deadline().unwrap() - rig.now();
    assert_eq!(earliest.as_secs(), 181);
    rig.advance(secs(190));
    assert_eq!(rig.status().entries.len(), 11);
}

#[test]
fn a_timer_woken_twice_before_it_looks_is_still_one_timer() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    rig.resident(&chat("b"), 10);
    rig.run();
    for seconds in [600, 300, 120] {
        rig.pool.set_idle(&chat("a"), Some(IdlePolicy::AfterSeconds(seconds)));
    }
    rig.run();
    assert_eq!(rig.clock.sleepers(), 1);
    rig.advance(secs(121));
    assert_eq!(rig.keys(), ["chat:b"]);
    assert_eq!(rig.clock.sleepers(), 1);
}
