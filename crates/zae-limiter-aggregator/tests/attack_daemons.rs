//! Promises of the daemon in docs/aggregator.md, tried with odd timings, streams and archives.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::play::{FakeStream, Play, play};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use zae_limiter_aggregator::daemon::{Daemon, Metrics, Missed, Notice, StreamError, Until};
use zae_limiter_aggregator::{Archive, ArchiveError};
use zae_limiter_core::BoxFuture;
use zae_limiter_schema::{Item, ItemKey, Value};
use zae_limiter_testkit::{Changed, Faults};

const HOUR: u64 = 3_600;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), StreamError>>,
    metrics: Arc<Metrics>,
}

fn start(mut daemon: Daemon) -> Running {
    let metrics = daemon.metrics();
    let (stop, stopped) = oneshot::channel();
    let task =
        tokio::spawn(
            async move { daemon.run(Until::Stopped, async { drop(stopped.await) }).await },
        );
    Running { stop, task, metrics }
}

impl Running {
    async fn end(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap().unwrap();
    }
}

fn missed(play: &Play) -> Vec<Missed> {
    let notices = play.notices.lock().unwrap();
    let missed = |(_, notice): &(u32, Notice)| match notice {
        Notice::Missed(missed) => Some(missed.clone()),
        _ => None,
    };
    notices.iter().filter_map(missed).collect()
}

#[derive(Clone, Debug)]
struct Slow {
    delay_us: u64,
    page: usize,
    shards: usize,
    takeovers: Vec<u64>,
}

/// How many changes the daemons book in 4 minutes, and how often one claimed a stream shard.
fn booked(slow: &Slow) -> (i64, usize) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let slow = slow.clone();
    play(async move |mut play| {
        play.stream.inside().page = slow.page;
        let entities = |shard| (0..50).map(move |entity| format!("{shard}-{entity}"));
        for shard in 0..slow.shards {
            let name = shard.to_string();
            play.stream.split(None, &name);
            for entity in std::iter::repeat_n((), 60).flat_map(|()| entities(shard)) {
                play.change(&name, &entity, 1);
            }
        }
        play.world.table.set_faults(Faults::delay(slow.delay_us));
        let daemon = |after: &u64| start(play.daemon_with(seconds(*after)));
        let running: Vec<Running> = slow.takeovers.iter().map(daemon).collect();
        play.world.time.sleep(seconds(240)).await;
        let booked = (0..slow.shards).flat_map(entities).map(|entity| play.booked(&entity)).sum();
        let claimed = play.noticed(|_, notice| matches!(notice, Notice::Claimed(_)));
        sender.send((booked, claimed)).unwrap();
        drop(running);
    });
    receiver.recv().unwrap()
}

fn check_slow(
    delay_us: u64,
    page: usize,
    shards: usize,
    takeovers: &[u64],
    wrong: &mut Vec<String>,
) {
    let slow = Slow { delay_us, page, shards, takeovers: vec![takeovers[0]] };
    let (alone, _) = booked(&slow);
    let many = Slow { takeovers: takeovers.to_vec(), ..slow };
    let (together, claimed) = booked(&many);
    let line = format!("{many:?}: together {together}, alone {alone}, claimed {claimed}");
    println!("{line}");
    // A tenth for moving stream shards.
    if together * 10 < alone * 9 || claimed > 20 * shards {
        wrong.push(line);
    }
}

/// Promise: several daemons on a slow table do at least the work of one, with any takeover time.
#[test]
fn a_takeover_time_of_one_second_causes_no_livelock_on_a_slow_table() {
    let mut wrong = Vec::new();
    for delay_us in [150_000, 600_000] {
        for (page, shards) in [(50, 1), (1, 2)] {
            for daemons in [2, 4] {
                check_slow(delay_us, page, shards, &vec![1; daemons], &mut wrong);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Promise: no livelock with daemons that have different takeover times. The one with 20 s beats every 5 s: the other
/// one must not take its stream shard after 1 s, lose it again, and so on.
#[test]
fn daemons_with_different_takeover_times_do_not_take_turns_for_ever() {
    let mut wrong = Vec::new();
    check_slow(250_000, 200, 2, &[20, 1], &mut wrong);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Promise: nothing leaves the stream unread silently. The daemon ends before it has seen the child of the last
/// stream shard; a part of the child's records is trimmed when the next one comes, and the parent is gone.
#[test]
fn a_child_that_nobody_saw_and_that_is_trimmed_in_part_is_reported() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 3);
        // The only child appears after the last list.
        let mut daemon = play.daemon();
        let notices = Arc::clone(&play.notices);
        let stream = Arc::clone(&play.stream);
        let stop = async {
            let has = |wanted: &dyn Fn(&Notice) -> bool| {
                notices.lock().unwrap().iter().any(|(_, notice)| wanted(notice))
            };
            while !has(&|notice| matches!(notice, Notice::Batch(_))) {
                play.world.time.sleep(Duration::from_millis(1)).await;
            }
            stream.inside().shards.get_mut("1").unwrap().closed = true;
            while !has(&|notice| matches!(notice, Notice::Finished(_))) {
                play.world.time.sleep(Duration::from_millis(1)).await;
            }
        };
        daemon.run(Until::Stopped, stop).await.unwrap();
        play.stream.split(Some("1"), "2");
        play.change("2", "a", 5);
        play.world.time.sleep(seconds(26 * HOUR)).await;
        play.change("2", "a", 2);
        play.stream.inside().shards.remove("1");
        play.stream.inside().shards.get_mut("2").unwrap().trimmed = 5;
        play.drain().await;
        assert_eq!(play.booked("a"), 5);
        assert_eq!(missed(&play).len(), 1, "5 changes are lost: {:?}", missed(&play));
    });
}

/// Rolls the open stream shard, as DynamoDB does every four hours, and removes those closed a day ago.
fn roll(play: &Play, number: u64) {
    play.stream.split(Some(&(number - 1).to_string()), &number.to_string());
    if let Some(old) = number.checked_sub(8) {
        play.stream.inside().shards.remove(&old.to_string());
    }
}

/// Promise: nothing is named that was not missed: a daemon that never stops, and a table without traffic for
/// days, whose stream shards roll; then the stream is disabled and enabled.
#[test]
fn a_daemon_that_never_stops_has_missed_nothing() {
    for (traffic, heartbeats) in [(1, false), (0, false), (0, true)] {
        play(async move |mut play| {
            play.stream.split(None, "0");
            if heartbeats {
                play.stream.follow(&play.world.table);
            }
            let running = start(play.daemon());
            for number in 1..12 {
                play.change(&(number - 1).to_string(), "a", traffic);
                play.world.time.sleep(seconds(4 * HOUR)).await;
                roll(&play, number);
            }
            play.world.time.sleep(seconds(60)).await;
            let at = format!("traffic {traffic}, heartbeats {heartbeats}");
            assert_eq!((play.booked("a"), missed(&play)), (11 * traffic as i64, vec![]), "{at}");
            let next = Arc::new(FakeStream::labelled("2026-11-21T00:00:00.000"));
            next.split(None, "x");
            play.stream.inside().shards.get_mut("11").unwrap().closed = true;
            play.stream.inside().next = Some(Arc::clone(&next));
            play.stream = next;
            play.change("x", "b", 4);
            play.world.time.sleep(seconds(60)).await;
            assert_eq!((play.booked("b"), missed(&play)), (4, vec![]), "{at}");
            running.end().await;
        });
    }
}

/// Promise: nothing is named that was not missed: a run each day, within the time the stream keeps changes.
#[test]
fn a_run_every_20_hours_misses_nothing() {
    for (traffic, heartbeats) in [(1, true), (1, false), (0, true), (0, false)] {
        play(async move |mut play| {
            play.stream.split(None, "0");
            if heartbeats {
                play.stream.follow(&play.world.table);
            }
            let mut changes = 0;
            for number in 1..40 {
                if number % 3 == 0 {
                    play.change(&(number - 1).to_string(), "a", traffic);
                    changes += traffic as i64;
                }
                play.world.time.sleep(seconds(4 * HOUR)).await;
                roll(&play, number);
                if number % 5 == 0 {
                    play.drain().await;
                }
            }
            play.drain().await;
            let at = format!("traffic {traffic}, heartbeats {heartbeats}");
            assert_eq!((play.booked("a"), missed(&play)), (changes, vec![]), "{at}");
        });
    }
}

/// Promise: nothing is named that was not missed: one open stream shard for days, in an emulator, whose records are
/// trimmed after they were read; the daemon is restarted each day, and once a stream shard without a parent appears.
#[test]
fn a_new_stream_shard_without_a_parent_beside_an_old_one_is_no_miss() {
    for restarts in [true, false] {
        play(async move |mut play| {
            play.stream.split(None, "1");
            let mut running = start(play.daemon());
            for _ in 0..14 {
                play.change("1", "a", 1);
                play.world.time.sleep(seconds(2 * HOUR)).await;
                let inside = &mut *play.stream.inside();
                let stored = inside.shards.get_mut("1").unwrap();
                stored.trimmed = stored.records.len().saturating_sub(12);
            }
            if restarts {
                running.end().await;
                running = start(play.daemon());
                play.world.time.sleep(seconds(60)).await;
            }
            assert_eq!((play.booked("a"), missed(&play)), (14, vec![]));
            play.stream.split(None, "2");
            play.change("2", "b", 3);
            play.world.time.sleep(seconds(60)).await;
            assert_eq!((play.booked("b"), missed(&play)), (3, vec![]), "restarts: {restarts}");
            assert_eq!(running.metrics.times_missed(), 0);
            running.end().await;
        });
    }
}

/// Promise: each missed change is named, also with clocks that are wrong by two minutes. Clocks that are wrong by
/// more are corrected by the table's time.
#[test]
fn clocks_that_are_wrong_by_minutes_hide_no_missed_change() {
    for (first, second) in [(0, 0), (2, -2), (-2, 2)] {
        play(async move |mut play| {
            play.clock_offset_us = first * 60_000_000;
            play.stream.split(None, "1");
            // It sees the stream shard, and no record.
            play.drain().await;
            play.change("1", "a", 5);
            play.world.time.sleep(seconds(24 * HOUR + 120)).await;
            play.stream.inside().shards.get_mut("1").unwrap().trimmed = 5;
            play.change("1", "a", 2);
            play.clock_offset_us = second * 60_000_000;
            play.drain().await;
            assert_eq!(play.booked("a"), 2);
            assert_eq!(missed(&play).len(), 1, "clocks {first} and {second} minutes off");
        });
    }
}

/// Promise: the named time contains the missed changes, also for a stream that could not be read for two days.
#[test]
fn a_stream_that_fails_for_two_days_is_reported_with_a_time_that_contains_the_changes() {
    for read_before in [0, 3] {
        play(async move |mut play| {
            play.stream.split(None, "1");
            play.change("1", "a", read_before);
            let running = start(play.daemon());
            play.world.time.sleep(seconds(300)).await;
            play.stream.inside().fails = u32::MAX;
            play.world.time.sleep(seconds(60)).await;
            let before = play.world.time.now();
            play.change("1", "a", 5);
            play.world.time.sleep(seconds(48 * HOUR)).await;
            {
                let inside = &mut *play.stream.inside();
                inside.shards.get_mut("1").unwrap().trimmed =
                    usize::try_from(read_before).unwrap() + 5;
                inside.fails = 0;
            }
            play.change("1", "a", 2);
            play.world.time.sleep(seconds(120)).await;
            assert_eq!(play.booked("a"), read_before as i64 + 2);
            let missed = missed(&play);
            assert_eq!(missed.len(), 1, "{missed:?}");
            assert!(missed[0].after.is_none_or(|after| after <= before), "{missed:?}");
            running.end().await;
        });
    }
}

/// Promise: `--once` processes what the stream holds now, and ends, while clients go on using the table.
#[test]
fn a_drain_ends_while_clients_use_the_table() {
    for every_ms in [5_000, 1_000, 200] {
        play(async move |mut play| {
            play.stream.split(None, "1");
            play.change("1", "a", 10);
            let mut daemon = play.daemon();
            let drained =
                tokio::spawn(
                    async move { daemon.run(Until::Drained, std::future::pending()).await },
                );
            let mut waited = 0;
            while !drained.is_finished() && waited < 600_000 {
                play.change("1", "b", 1);
                play.world.time.sleep(Duration::from_millis(every_ms)).await;
                waited += every_ms;
            }
            assert!(play.booked("a") == 10, "{}", play.booked("a"));
            assert!(drained.is_finished(), "a change every {every_ms} ms: no end in ten minutes");
        });
    }
}

/// An archive that never answers.
#[derive(Debug, Default)]
struct Hung {
    calls: AtomicUsize,
}

impl Archive for Hung {
    fn put<'a>(&'a self, _: &'a str, _: Vec<u8>) -> BoxFuture<'a, Result<(), ArchiveError>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(std::future::pending())
    }
}

fn expire(play: &Play, shard: &str, id: &str) {
    let key = ItemKey::new("abcdefghijk/AUDIT#a", format!("#AUDIT#{id}"));
    let item = Item::from([("timestamp".to_owned(), Value::text("2026-08-15T00:00:00Z"))]);
    let changed = Changed { at_us: 0, key, old: Some(item), new: None, by_table: true };
    let number = play.stream.inside().next_number();
    play.stream.push(shard, common::record(&changed, number, play.world.time.now()));
}

/// Promise: the daemon keeps up to 10,000 events of a stream shard in memory, also while the archive hangs.
#[test]
fn a_hung_archive_keeps_at_most_10_000_events_in_memory() {
    play(async |mut play| {
        play.archive = Some(Arc::new(Hung::default()));
        play.stream.inside().page = 500;
        play.stream.split(None, "1");
        for at in 0..30_000 {
            expire(&play, "1", &format!("01A{at:06}"));
        }
        let running = start(play.daemon());
        play.world.time.sleep(seconds(3 * HOUR)).await;
        let read = play.stream.inside().read.len() * 500;
        assert!(read <= 10_500, "{read} events are in memory");
        running.end().await;
    });
}

/// Promise: `--once` ends with an error while the archive hangs.
#[test]
fn a_drain_ends_although_the_archive_hangs() {
    play(async |mut play| {
        play.archive = Some(Arc::new(Hung::default()));
        play.stream.split(None, "1");
        expire(&play, "1", "01A");
        play.change("1", "a", 6);
        let mut daemon = play.daemon();
        let drained =
            tokio::spawn(async move { daemon.run(Until::Drained, std::future::pending()).await });
        play.world.time.sleep(seconds(600)).await;
        assert!(drained.is_finished());
        assert!(drained.await.unwrap().is_err());
        assert_eq!(play.booked("a"), 6);
    });
}

/// Promise: `--once` ends with an error when more than 10,000 events wait for an archive that is down.
#[test]
fn a_drain_ends_with_more_events_than_the_daemon_keeps() {
    #[derive(Debug)]
    struct Down;
    impl Archive for Down {
        fn put<'a>(&'a self, _: &'a str, _: Vec<u8>) -> BoxFuture<'a, Result<(), ArchiveError>> {
            Box::pin(async {
                Err(ArchiveError { message: "the disk is full".to_owned(), source: None })
            })
        }
    }
    play(async |mut play| {
        play.archive = Some(Arc::new(Down));
        play.stream.inside().page = 500;
        play.stream.split(None, "1");
        for at in 0..12_000 {
            expire(&play, "1", &format!("01A{at:06}"));
        }
        play.change("1", "a", 6);
        let mut daemon = play.daemon();
        let drained =
            tokio::spawn(async move { daemon.run(Until::Drained, std::future::pending()).await });
        play.world.time.sleep(seconds(3 * HOUR)).await;
        assert!(drained.is_finished(), "no end in three hours");
        assert!(drained.await.unwrap().is_err());
    });
}

/// An archive that can be down.
#[derive(Debug, Default)]
struct Shelf {
    is_down: AtomicBool,
    files: AtomicUsize,
}

impl Archive for Shelf {
    fn put<'a>(&'a self, _: &'a str, _: Vec<u8>) -> BoxFuture<'a, Result<(), ArchiveError>> {
        Box::pin(async {
            if self.is_down.load(Ordering::Relaxed) {
                return Err(ArchiveError { message: "the disk is full".to_owned(), source: None });
            }
            self.files.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
    }
}

/// Promise: no event is lost while the stream has it. The archive is down for 24 hours. Events that expired in the
/// last hour are in the stream and in memory when the daemon gives up the oldest one.
#[test]
fn giving_up_an_old_event_loses_no_new_one() {
    play(async |mut play| {
        let shelf = Arc::new(Shelf::default());
        shelf.is_down.store(true, Ordering::Relaxed);
        play.archive = Some(Arc::clone(&shelf) as Arc<dyn Archive>);
        play.stream.split(None, "1");
        expire(&play, "1", "01A");
        let running = start(play.daemon());
        play.world.time.sleep(seconds(23 * HOUR)).await;
        for id in ["01B", "01C", "01D"] {
            expire(&play, "1", id);
        }
        play.world.time.sleep(seconds(HOUR + 600)).await;
        let given_up = |_, notice: &Notice| match notice {
            Notice::Unarchived(lost) => lost.events > 1,
            _ => false,
        };
        let too_many = play.noticed(given_up);
        shelf.is_down.store(false, Ordering::Relaxed);
        play.world.time.sleep(seconds(600)).await;
        assert_eq!(
            (too_many, shelf.files.load(Ordering::Relaxed) > 0),
            (0, true),
            "three of four are lost"
        );
        running.end().await;
    });
}

/// Promise: `--once` ends, beside a daemon that is alive, one that has crashed, on a stream that is disabled, and on
/// one without stream shards.
#[test]
fn a_drain_ends_beside_others_and_on_streams_without_an_end() {
    for (shards, is_closed, other) in
        [(0, false, 0), (1, true, 0), (2, false, 1), (2, false, 2), (2, true, 1), (1, false, 1)]
    {
        play(async move |mut play| {
            play.stream.follow(&play.world.table);
            for shard in 0..shards {
                play.stream.split(None, &shard.to_string());
                play.change(&shard.to_string(), &shard.to_string(), 5);
            }
            let running = (other > 0).then(|| start(play.daemon()));
            play.world.time.sleep(seconds(30)).await;
            if other == 2 {
                running.as_ref().unwrap().task.abort();
            }
            if is_closed {
                play.stream.inside().shards.values_mut().for_each(|shard| shard.closed = true);
            }
            let mut daemon = play.daemon();
            let drained =
                tokio::spawn(
                    async move { daemon.run(Until::Drained, std::future::pending()).await },
                );
            play.world.time.sleep(seconds(120)).await;
            let at = format!("{shards} stream shards, closed {is_closed}, other {other}");
            assert!(drained.is_finished(), "{at}");
            drained.await.unwrap().unwrap();
            let booked: i64 = (0..shards).map(|shard| play.booked(&shard.to_string())).sum();
            assert_eq!((booked, missed(&play)), (5 * shards, vec![]), "{at}");
            drop(running);
        });
    }
}
