//! Daemons on a simulated stream: stream shards that split, iterators that expire, records that are
//! trimmed, and daemons that share the work, crash and take over.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::play::{Play, play};
use zae_limiter_aggregator::daemon::{Notice, Until};
use zae_limiter_schema::{ItemKey, Table, Update, Value};
use zae_limiter_testkit::Faults;

#[test]
fn parents_are_read_to_their_end_before_their_children() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 10);
        play.stream.split(Some("1"), "2");
        play.stream.split(Some("1"), "3");
        play.change("2", "a", 6);
        play.change("3", "b", 5);
        play.stream.split(Some("3"), "4");
        play.change("4", "b", 2);
        play.drain().await;
        assert_eq!((play.booked("a"), play.booked("b")), (16, 7));
        let read = play.stream.0.lock().unwrap().read.clone();
        let first = |shard: &str| read.iter().position(|one| one == shard).unwrap();
        let last = |shard: &str| read.iter().rposition(|one| one == shard).unwrap();
        assert!(last("1") < first("2") && last("1") < first("3") && last("3") < first("4"));
        assert_eq!(play.noticed(|_, notice| matches!(notice, Notice::Finished(_))), 2);
        // The next daemon continues where this one has stopped.
        let reads = read.len();
        play.change("4", "b", 1);
        play.drain().await;
        assert_eq!((play.booked("b"), play.stream.0.lock().unwrap().read.len()), (8, reads + 1));
    });
}

#[test]
fn expired_iterators_lose_nothing_and_trimmed_records_are_reported() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 3);
        play.drain().await;
        play.change("1", "a", 5);
        {
            let inside = &mut *play.stream.0.lock().unwrap();
            // All iterators so far expire, and one call fails.
            (inside.oldest_iterator, inside.fails) = (inside.iterators + 2, 1);
        }
        play.drain().await;
        assert_eq!(play.booked("a"), 8);
        play.change("1", "a", 4);
        play.stream.0.lock().unwrap().shards.get_mut("1").unwrap().trimmed = 10;
        play.drain().await;
        // Two records are lost, and a notice says so.
        assert_eq!(play.booked("a"), 10);
        assert_eq!(play.noticed(|_, notice| matches!(notice, Notice::Missed(_))), 1);
    });
}

#[test]
fn records_that_are_lost_are_reported_once() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 3);
        play.drain().await;
        play.change("1", "a", 2);
        play.stream.inside().shards.get_mut("1").unwrap().trimmed = 5;
        let missed = |play: &Play| play.noticed(|_, notice| matches!(notice, Notice::Missed(_)));
        let mut daemon = play.daemon();
        let task = tokio::spawn(async move {
            daemon.run(Until::Stopped, std::future::pending()).await.unwrap();
        });
        play.world.time.sleep(Duration::from_secs(120)).await;
        assert_eq!(missed(&play), 1);
        // It crashes. The next daemon finds no position that is gone.
        play.world.table.crash(2);
        task.abort();
        play.drain().await;
        assert_eq!((missed(&play), play.booked("a")), (1, 3));
        play.change("1", "a", 4);
        play.drain().await;
        assert_eq!((missed(&play), play.booked("a")), (1, 7));
    });
}

#[test]
fn two_daemons_share_the_stream_shards_and_one_takes_over() {
    play(async |mut play| {
        for shard in ["1", "2", "3", "4"] {
            play.stream.split(None, shard);
        }
        let (mut first, mut second) = (play.daemon(), play.daemon());
        let first = tokio::spawn(async move {
            first.run(Until::Stopped, std::future::pending()).await.unwrap();
        });
        play.world.time.sleep(Duration::from_secs(8)).await;
        let took = |play: &Play, daemon| {
            let took =
                play.noticed(|one, notice| one == daemon && matches!(notice, Notice::Claimed(_)));
            let lost =
                play.noticed(|one, notice| one == daemon && matches!(notice, Notice::Lost(_)));
            took - lost
        };
        assert_eq!(took(&play, 1), 4);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let second = tokio::spawn(async move {
            let stop = async { drop(stopped.await) };
            second.run(Until::Stopped, stop).await.unwrap();
        });
        play.world.time.sleep(Duration::from_secs(30)).await;
        assert_eq!((took(&play, 1), took(&play, 2)), (2, 2));
        for shard in ["1", "2", "3", "4"] {
            play.change(shard, &format!("e{shard}"), 9);
        }
        play.world.time.sleep(Duration::from_secs(3)).await;
        // The first daemon crashes without releasing its stream shards. The second takes over.
        play.world.table.crash(1);
        first.abort();
        for shard in ["1", "2", "3", "4"] {
            play.change(shard, &format!("e{shard}"), 9);
        }
        play.world.time.sleep(Duration::from_secs(40)).await;
        for shard in ["1", "2", "3", "4"] {
            assert_eq!(play.booked(&format!("e{shard}")), 18, "{shard}");
        }
        assert_eq!(took(&play, 2), 4);
        // The second daemon is stopped and releases its stream shards at once.
        stop.send(()).unwrap();
        second.await.unwrap();
        play.change("1", "e1", 1);
        let before = play.world.time.now();
        play.drain().await;
        assert_eq!(play.booked("e1"), 19);
        assert!(play.world.time.now().millis_since(before) < 5_000);
    });
}

#[test]
fn draining_takes_over_from_crashed_daemons_but_not_from_live_ones() {
    play(async |mut play| {
        for shard in ["1", "2"] {
            play.stream.split(None, shard);
            play.change(shard, &format!("e{shard}"), 3);
        }
        let mut first = play.daemon();
        let first = tokio::spawn(async move {
            first.run(Until::Stopped, std::future::pending()).await.unwrap();
        });
        play.world.time.sleep(Duration::from_secs(7)).await;
        play.change("1", "e1", 5);
        // The first daemon is alive and processes its half.
        play.drain().await;
        play.world.table.crash(1);
        first.abort();
        for shard in ["1", "2"] {
            play.change(shard, &format!("e{shard}"), 4);
        }
        play.drain().await;
        assert_eq!((play.booked("e1"), play.booked("e2")), (12, 7));
    });
}

#[test]
fn a_failed_batch_is_retried_and_an_invalid_record_is_skipped() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 2);
        let mut bad = play.stream.0.lock().unwrap().shards["1"].records[1].clone();
        bad["dynamodb"]["SequenceNumber"] = "200000000000000000000000000".into();
        bad["dynamodb"]["NewImage"]["b_rpm_tc"] = serde_json::json!({ "S": "many" });
        play.stream.push("1", bad);
        let mut daemon = play.daemon();
        let metrics = daemon.metrics();
        // A usage record that cannot be written, because it holds text instead of a number.
        let key = ItemKey::new("abcdefghijk/ENTITY#a", "#USAGE#gpt-4#2026-11");
        let action = zae_limiter_schema::Action::Set("rpm".to_owned(), Value::text("not a number"));
        let update = Update { key, actions: vec![action], conditions: Vec::new() };
        play.world.table.update(&update).await.unwrap();
        daemon.run(Until::Drained, std::future::pending()).await.unwrap();
        let text = metrics.text();
        for line in [
            "records_total 3",
            "failed_records_total 3",
            "snapshots_updated_total 2",
            "stream_shards 1",
        ] {
            assert!(text.contains(&format!("zae_limiter_aggregator_{line}\n")), "{line}: {text}");
        }
        // Throttling for a while loses nothing.
        play.world.table.set_faults(Faults { throttled: 0.9, ..Faults::delay(500) });
        play.change("1", "b", 5);
        let mut daemon = play.daemon();
        let tasks = tokio::spawn(async move {
            daemon.run(Until::Stopped, std::future::pending()).await.unwrap();
        });
        play.world.time.sleep(Duration::from_secs(60)).await;
        play.world.table.set_faults(Faults::delay(500));
        play.world.time.sleep(Duration::from_secs(60)).await;
        assert_eq!(play.booked("b"), 5);
        tasks.abort();
    });
}

/// How many errors a daemon reports in a minute in which all its calls fail in this way. It follows a stream shard, and
/// finishes or claims another one.
fn errors_in_a_minute(faults: Faults) -> usize {
    let errors = Arc::new(AtomicUsize::new(0));
    let found = Arc::clone(&errors);
    play(async move |mut play| {
        play.stream.split(None, "1");
        let mut daemon = play.daemon();
        let task = tokio::spawn(async move {
            daemon.run(Until::Stopped, std::future::pending()).await.unwrap();
        });
        play.world.time.sleep(Duration::from_secs(2)).await;
        play.world.table.set_faults(faults);
        play.stream.split(Some("1"), "2");
        play.stream.split(None, "3");
        play.world.time.sleep(Duration::from_secs(60)).await;
        let is_error = |_, notice: &Notice| matches!(notice, Notice::TransientError(_));
        errors.store(play.noticed(is_error), Ordering::Relaxed);
        play.world.table.set_faults(Faults::delay(500));
        play.change("2", "a", 2);
        play.world.time.sleep(Duration::from_secs(10)).await;
        assert_eq!(play.booked("a"), 2);
        task.abort();
    });
    found.load(Ordering::Relaxed)
}

#[test]
fn a_daemon_pauses_after_each_call_on_the_checkpoints_that_fails() {
    // All calls, and only writes.
    for faults in [
        Faults { throttled: 1.0, ..Faults::delay(500) },
        Faults { hot_partition: 1.0, hot_us: 1_000..=1_000, ..Faults::delay(500) },
    ] {
        let errors = errors_in_a_minute(faults.clone());
        assert!((30..300).contains(&errors), "{errors} errors with {faults:?}");
    }
}

#[test]
fn a_new_stream_is_read_from_its_beginning() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 3);
        play.drain().await;
        // The checkpoint is one of an earlier stream.
        let key = ItemKey::new("_/SYSTEM#", "#STREAM#1");
        let action = zae_limiter_schema::Action::Set("stream".to_owned(), Value::text("2025"));
        let update = Update { key, actions: vec![action], conditions: Vec::new() };
        play.world.table.update(&update).await.unwrap();
        let reads = play.stream.0.lock().unwrap().read.len();
        play.drain().await;
        assert_eq!(play.stream.0.lock().unwrap().read.len(), reads * 2);
        assert_eq!(play.booked("a"), 3);
    });
}

/// One step of a table with a function and a daemon.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A bucket changes, so often.
    Change(u64),
    /// The function gets so many further records.
    Function(usize),
    /// The function gets the last batch again.
    Again,
    /// A daemon reads everything.
    Daemon,
}

/// Plays the steps on two stream shards, then lets both catch up. Usage must equal the changes.
async fn both(mut play: Play, steps: &[Step]) {
    let shards = [("1", "a"), ("2", "b")];
    for (shard, _) in shards {
        play.stream.split(None, shard);
    }
    let (mut changed, mut seen, mut last) = (0, [0_usize, 0], [0..0, 0..0]);
    for step in steps.iter().chain(&[Step::Function(usize::MAX), Step::Daemon]) {
        for (at, (shard, entity)) in shards.into_iter().enumerate() {
            let length = play.stream.0.lock().unwrap().shards[shard].records.len();
            match *step {
                Step::Change(times) => play.change(shard, entity, times),
                Step::Function(count) => {
                    last[at] = seen[at]..length.min(seen[at].saturating_add(count));
                    seen[at] = last[at].end;
                    play.invoke(shard, last[at].clone()).await;
                }
                Step::Again => play.invoke(shard, last[at].clone()).await,
                Step::Daemon => {}
            }
        }
        match *step {
            Step::Change(times) => changed += i64::try_from(times).unwrap(),
            Step::Daemon => play.drain().await,
            Step::Function(_) | Step::Again => {}
        }
    }
    assert_eq!((play.booked("a"), play.booked("b")), (changed, changed), "{steps:?}");
}

#[test]
fn what_function_and_daemon_both_book_counts_once() {
    use Step::{Again, Change, Daemon as Drain, Function};
    for steps in [
        &[Change(9), Function(9), Drain][..],
        &[Change(9), Drain, Function(9)],
        &[Change(9), Function(4), Drain, Function(5), Again],
        &[Change(9), Drain, Change(9), Function(5), Drain, Again, Function(13)],
    ] {
        play(async |play| both(play, steps).await);
    }
    for seed in 0..40 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let steps = (0..12).map(|_| match rng.u8(0..5) {
            0 | 1 => Change(rng.u64(1..6)),
            2 => Function(rng.usize(1..8)),
            3 => Again,
            _ => Drain,
        });
        let steps: Vec<Step> = steps.collect();
        play(async move |play| both(play, &steps).await);
    }
}
