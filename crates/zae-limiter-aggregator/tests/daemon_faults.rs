//! Daemons in a world that is slow, hangs and forgets: livelocks, changes that leave the stream unread, calls that
//! are never answered, empty pages, panics, streams that are switched off and on.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::play::{FakeStream, Play, play};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use zae_limiter_aggregator::daemon::{Daemon, Metrics, Missed, Notice, StreamError, Until};
use zae_limiter_aggregator::{Archive, ArchiveError};
use zae_limiter_core::BoxFuture;
use zae_limiter_schema::{Item, ItemKey, Value};
use zae_limiter_testkit::{Changed, Faults};

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A daemon that runs until it is stopped.
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

fn missed(play: &Play) -> Vec<Missed> {
    let notices = play.notices.lock().unwrap();
    let missed = |(_, notice): &(u32, Notice)| match notice {
        Notice::Missed(missed) => Some(missed.clone()),
        _ => None,
    };
    notices.iter().filter_map(missed).collect()
}

/// How many changes so many daemons book in 8 minutes, and how often one claimed a stream shard. A write takes
/// 750 ms. Each page has changes of 200 entities, so it takes longer than the time until a takeover.
fn booked_in_8_minutes(daemons: usize, shards: usize) -> (i64, usize) {
    let (sender, receiver) = std::sync::mpsc::channel();
    play(async move |mut play| {
        play.stream.inside().page = 200;
        let entities = |shard| (0..200).map(move |entity| format!("{shard}-{entity}"));
        for shard in 0..shards {
            let name = shard.to_string();
            play.stream.split(None, &name);
            for entity in std::iter::repeat_n((), 25).flat_map(|()| entities(shard)) {
                play.change(&name, &entity, 1);
            }
        }
        play.world.table.set_faults(Faults::delay(375_000));
        let running: Vec<Running> = (0..daemons).map(|_| start(play.daemon())).collect();
        play.world.time.sleep(seconds(480)).await;
        let booked = (0..shards).flat_map(entities).map(|entity| play.booked(&entity)).sum();
        let claimed = play.noticed(|_, notice| matches!(notice, Notice::Claimed(_)));
        sender.send((booked, claimed)).unwrap();
        drop(running);
    });
    receiver.recv().unwrap()
}

#[test]
fn several_daemons_on_a_slow_table_process_as_much_as_one() {
    for shards in [1, 4] {
        let (alone, claimed) = booked_in_8_minutes(1, shards);
        assert_eq!(claimed, shards);
        assert!(alone > 3_000, "{alone}");
        for daemons in [2, 4] {
            let (together, claimed) = booked_in_8_minutes(daemons, shards);
            println!(
                "{shards} stream shards, {daemons} daemons: {together}, alone {alone}, claimed {claimed}"
            );
            // They move the stream shards once, until all have the same share.
            assert!(claimed <= 2 * shards, "{daemons} daemons claimed {claimed} times");
            assert!(together * 100 >= alone * 99, "{daemons} daemons: {together}, alone {alone}");
        }
    }
}

#[test]
fn a_daemon_that_loses_a_stream_shard_hands_over_its_position() {
    play(async |mut play| {
        play.stream.split(None, "1");
        let first = start(play.daemon());
        play.world.time.sleep(seconds(1)).await;
        play.change("1", "a", 40);
        play.world.time.sleep(seconds(2)).await;
        assert_eq!(play.booked("a"), 40);
        // Another daemon takes it over before the first one has written its position.
        let key = ItemKey::new("_/SYSTEM#", "#STREAM#1");
        let stored = play.world.table.item(&key).unwrap();
        assert_eq!(stored.get("position"), None);
        let second = start(play.daemon());
        let owner = zae_limiter_schema::Action::Set("owner".to_owned(), Value::text("crashed"));
        let update = zae_limiter_schema::Update {
            key: key.clone(),
            actions: vec![owner],
            conditions: Vec::new(),
        };
        zae_limiter_schema::Table::update(&play.world.table, &update).await.unwrap();
        play.world.time.sleep(seconds(4)).await;
        let position = play.world.table.item(&key).unwrap().get("position").cloned();
        assert_eq!(position, Some(Value::text(common::sequence_number(40))));
        let reads = play.stream.inside().read.len();
        play.world.time.sleep(seconds(40)).await;
        assert_eq!(play.stream.inside().read.len(), reads, "nothing is read again");
        drop((first, second));
    });
}

#[test]
fn a_stream_shard_that_goes_while_no_daemon_runs_is_reported_with_its_time() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 3);
        play.drain().await;
        let stopped = play.world.time.now();
        play.world.time.sleep(seconds(100_000)).await;
        play.change("1", "a", 2);
        play.stream.split(Some("1"), "2");
        play.change("2", "a", 4);
        play.stream.inside().shards.remove("1");
        play.drain().await;
        assert_eq!(play.booked("a"), 7);
        let missed = missed(&play);
        assert_eq!(missed.len(), 1, "{missed:?}");
        assert_eq!(missed[0].shard, "1");
        let after = missed[0].after.unwrap();
        assert!(after >= common::NOW && after <= stopped, "{missed:?}");
        assert_eq!(missed[0].before, play.world.time.now().min(missed[0].before));
        // It is reported once.
        play.drain().await;
        assert_eq!(play.noticed(|_, notice| matches!(notice, Notice::Missed(_))), 1);
    });
}

#[test]
fn a_stream_shard_that_goes_while_a_daemon_holds_it_is_reported_too() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 3);
        let running = start(play.daemon());
        play.world.time.sleep(seconds(30)).await;
        play.change("1", "a", 5);
        play.stream.split(Some("1"), "2");
        play.stream.inside().shards.remove("1");
        play.change("2", "a", 1);
        play.world.time.sleep(seconds(30)).await;
        assert_eq!(play.booked("a"), 4);
        assert_eq!(missed(&play).len(), 1, "{:?}", missed(&play));
        assert_eq!(running.metrics.times_missed(), 1);
        assert!(running.metrics.text().contains("zae_limiter_aggregator_missed_total 1\n"));
    });
}

#[test]
fn a_whole_generation_that_nobody_saw_is_reported() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 3);
        play.stream.split(Some("1"), "2");
        // The daemon ends between the end of the parent and the claim of its child.
        let mut daemon = play.daemon();
        let finished = Arc::clone(&play.notices);
        let stop = async {
            let is_over = || {
                let notices = finished.lock().unwrap();
                notices.iter().any(|(_, notice)| matches!(notice, Notice::Finished(_)))
            };
            while !is_over() {
                play.world.time.sleep(Duration::from_millis(1)).await;
            }
        };
        daemon.run(Until::Stopped, stop).await.unwrap();
        assert_eq!(play.noticed(|_, notice| matches!(notice, Notice::Claimed(_))), 1);
        play.change("2", "a", 5);
        play.stream.split(Some("2"), "3");
        play.change("3", "a", 1);
        play.stream.inside().shards.remove("1");
        play.stream.inside().shards.remove("2");
        play.world.time.sleep(seconds(2 * 86_400)).await;
        play.drain().await;
        assert_eq!(play.booked("a"), 4);
        assert_eq!(missed(&play).len(), 1, "{:?}", missed(&play));
    });
}

/// What does not answer.
#[derive(Clone, Copy, Debug)]
enum Hang {
    Stream,
    Table,
    Both,
}

fn hang(play: &Play, what: Hang) {
    if matches!(what, Hang::Stream | Hang::Both) {
        play.stream.inside().hangs = true;
    }
    if matches!(what, Hang::Table | Hang::Both) {
        play.world.table.set_faults(Faults { hung: 1.0, ..Faults::delay(500) });
    }
}

#[test]
fn a_daemon_stops_within_10_seconds_whatever_hangs_and_whenever() {
    for what in [Hang::Stream, Hang::Table, Hang::Both] {
        // From the first call on, while it claims, reads, books, writes checkpoints, and rests.
        for from_ms in [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 15, 20, 100, 1_000, 5_000, 5_001, 7_000] {
            for stop_after in [Duration::ZERO, seconds(4), seconds(70)] {
                play(async move |mut play| {
                    play.stream.split(None, "1");
                    play.stream.split(None, "2");
                    play.change("1", "a", 30);
                    play.change("2", "b", 30);
                    let running = start(play.daemon());
                    play.world.time.sleep(Duration::from_millis(from_ms)).await;
                    hang(&play, what);
                    play.world.time.sleep(stop_after).await;
                    let before = play.world.time.now();
                    running.stop.send(()).unwrap();
                    running.task.await.unwrap().unwrap();
                    let took = play.world.time.now().millis_since(before);
                    assert!(took <= 3_000, "{what:?} from {from_ms} ms on: {took} ms");
                    if stop_after > seconds(60) {
                        // It was not silent.
                        let is_error = |_, notice: &Notice| match notice {
                            Notice::TransientError(_) => true,
                            Notice::Batch(report) => !report.errors.is_empty(),
                            _ => false,
                        };
                        assert!(play.noticed(is_error) > 0, "{what:?} from {from_ms} ms on");
                        let text = running.metrics.text();
                        assert!(!text.contains("aggregator_errors_total 0\n"), "{text}");
                    }
                });
            }
        }
    }
}

#[test]
fn a_daemon_recovers_when_everything_has_hung_for_a_minute() {
    for what in [Hang::Stream, Hang::Table, Hang::Both] {
        for from_ms in [0, 1, 2, 3, 5, 10, 1_000, 5_000] {
            play(async move |mut play| {
                play.stream.split(None, "1");
                play.change("1", "a", 30);
                let running = start(play.daemon());
                play.world.time.sleep(Duration::from_millis(from_ms)).await;
                hang(&play, what);
                play.world.time.sleep(seconds(60)).await;
                play.stream.inside().hangs = false;
                play.world.table.set_faults(Faults::delay(500));
                play.world.time.sleep(seconds(65)).await;
                assert_eq!(play.booked("a"), 30, "{what:?} from {from_ms} ms on");
                drop(running);
            });
        }
    }
}

#[test]
fn empty_pages_are_read_on() {
    for (is_closed, empty_pages) in [(true, 5), (true, 2_000), (false, 5), (false, 90)] {
        play(async move |mut play| {
            play.stream.split(None, "1");
            play.change("1", "a", 6);
            play.stream.inside().shards.get_mut("1").unwrap().empty_pages = empty_pages;
            if is_closed {
                play.stream.split(Some("1"), "2");
                play.change("2", "a", 2);
            }
            play.drain().await;
            let wanted = if is_closed { 8 } else { 6 };
            assert_eq!(play.booked("a"), wanted, "{empty_pages} pages, closed: {is_closed}");
        });
    }
}

/// The table's stream has the daemons' heartbeats, too. Here there is one for every 13 empty pages.
#[test]
fn a_drain_ends_although_heartbeats_fill_the_stream() {
    for names_the_last_record in [false, true] {
        play(async move |mut play| {
            play.stream.split(None, "1");
            play.change("1", "a", 6);
            play.stream.follow(&play.world.table);
            play.stream.inside().names_the_last_record = names_the_last_record;
            let running = start(play.daemon_with(seconds(1)));
            play.world.time.sleep(seconds(2)).await;
            running.stop.send(()).unwrap();
            running.task.await.unwrap().unwrap();
            play.change("1", "a", 3);
            let before = play.world.time.now();
            let mut daemon = play.daemon_with(seconds(1));
            daemon.run(Until::Drained, std::future::pending()).await.unwrap();
            assert_eq!(play.booked("a"), 9);
            let took = play.world.time.now().millis_since(before);
            assert!(took < 5_000, "{took} ms");
        });
    }
}

#[test]
fn the_daemons_own_writes_are_not_foreign_records() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.world.table.take_changes();
        play.drain().await;
        let written = play.world.table.take_changes();
        assert!(!written.is_empty());
        for (at, changed) in written.iter().enumerate() {
            let record = common::record(changed, at as u64 + 1, common::NOW);
            play.stream.push("1", record);
        }
        let mut daemon = play.daemon();
        daemon.run(Until::Drained, std::future::pending()).await.unwrap();
        let figures = daemon.metrics().figures();
        assert_eq!((figures["records"], figures["foreign_records"]), (written.len() as u64, 0));
    });
}

#[test]
fn a_stream_shard_whose_pages_panic_holds_up_no_other() {
    play(async |mut play| {
        for shard in ["1", "2"] {
            play.stream.split(None, shard);
            play.change(shard, shard, 9);
        }
        play.stream.inside().shards.get_mut("1").unwrap().panics = true;
        let running = start(play.daemon());
        play.world.time.sleep(seconds(60)).await;
        assert_eq!((play.booked("1"), play.booked("2")), (0, 9));
        assert!(running.metrics.figures()["errors"] > 0);
        play.stream.inside().shards.get_mut("1").unwrap().panics = false;
        play.world.time.sleep(seconds(31)).await;
        assert_eq!((play.booked("1"), play.booked("2")), (9, 9));
    });
}

#[test]
fn a_daemon_follows_the_next_stream_of_the_table() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 3);
        let running = start(play.daemon());
        play.world.time.sleep(seconds(3)).await;
        // Disabled, with a change that is not read yet; then enabled again, under the same id.
        play.change("1", "a", 2);
        play.stream.inside().shards.get_mut("1").unwrap().closed = true;
        play.world.time.sleep(seconds(30)).await;
        assert_eq!(play.booked("a"), 5);
        assert_eq!(play.noticed(|_, notice| *notice == Notice::StreamEnded), 1);
        let next = Arc::new(FakeStream::labelled("2026-11-16T00:00:00.000"));
        next.split(None, "1");
        play.stream.inside().next = Some(Arc::clone(&next));
        play.stream = next;
        play.change("1", "a", 4);
        play.world.time.sleep(seconds(30)).await;
        assert_eq!(play.booked("a"), 9);
        assert_eq!(play.noticed(|_, notice| matches!(notice, Notice::NextStream(_))), 1);
        assert_eq!(missed(&play), []);
        drop(running);
    });
}

/// An archive that can be down.
#[derive(Debug, Default)]
struct Shelf {
    is_down: AtomicBool,
    panics: AtomicBool,
    files: Mutex<BTreeSet<String>>,
}

impl Shelf {
    fn set(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::Relaxed);
    }

    fn files(&self) -> usize {
        self.files.lock().unwrap().len()
    }
}

impl Archive for Shelf {
    fn put<'a>(&'a self, name: &'a str, _: Vec<u8>) -> BoxFuture<'a, Result<(), ArchiveError>> {
        Box::pin(async move {
            assert!(!self.panics.load(Ordering::Relaxed), "a fault of the archive");
            if self.is_down.load(Ordering::Relaxed) {
                return Err(ArchiveError { message: "the disk is full".to_owned(), source: None });
            }
            self.files.lock().unwrap().insert(name.to_owned());
            Ok(())
        })
    }
}

/// An audit event expires.
fn expire(play: &Play, shard: &str, id: &str) {
    let key = ItemKey::new("abcdefghijk/AUDIT#a", format!("#AUDIT#{id}"));
    let item = Item::from([("timestamp".to_owned(), Value::text("2026-08-15T00:00:00Z"))]);
    let changed = Changed { at_us: 0, key, old: Some(item), new: None, by_table: true };
    let number = play.stream.inside().next_number();
    play.stream.push(shard, common::record(&changed, number, play.world.time.now()));
}

fn position(play: &Play, shard: &str) -> Option<Value> {
    let key = ItemKey::new("_/SYSTEM#", format!("#STREAM#{shard}"));
    play.world.table.item(&key).unwrap().get("position").cloned()
}

#[test]
fn an_archive_that_is_down_holds_up_no_usage_and_loses_no_event() {
    play(async |mut play| {
        let shelf = Arc::new(Shelf::default());
        play.archive = Some(Arc::clone(&shelf) as Arc<dyn Archive>);
        shelf.set(true);
        play.stream.split(None, "1");
        play.change("1", "a", 2);
        let running = start(play.daemon());
        play.world.time.sleep(seconds(8)).await;
        let before = position(&play, "1");
        assert!(before.is_some());
        expire(&play, "1", "01A");
        play.change("1", "a", 30);
        expire(&play, "1", "01B");
        play.world.time.sleep(seconds(600)).await;
        assert_eq!(play.booked("a"), 32, "usage of the same page and of later ones");
        // The table's position is before the first event: whoever comes next finds it.
        assert_eq!((position(&play, "1"), shelf.files()), (before.clone(), 0));
        assert!(running.metrics.figures()["errors"] > 5, "it says so");
        drop(running);
        shelf.set(false);
        let running = start(play.daemon());
        play.world.time.sleep(seconds(120)).await;
        assert_eq!((shelf.files(), play.booked("a")), (2, 32));
        assert_ne!(position(&play, "1"), before);
        // The same daemon goes on when the archive is back, also after a panic.
        shelf.set(true);
        expire(&play, "1", "01C");
        play.world.time.sleep(seconds(60)).await;
        shelf.panics.store(true, Ordering::Relaxed);
        play.world.time.sleep(seconds(120)).await;
        shelf.panics.store(false, Ordering::Relaxed);
        shelf.set(false);
        play.world.time.sleep(seconds(120)).await;
        assert_eq!(shelf.files(), 3);
        assert_eq!((running.metrics.times_missed(), missed(&play)), (0, Vec::new()));
        drop(running);
    });
}

#[test]
fn a_drain_ends_with_an_error_while_the_archive_is_down_and_the_next_one_finds_the_events() {
    for is_closed in [false, true] {
        play(async move |mut play| {
            let shelf = Arc::new(Shelf::default());
            play.archive = Some(Arc::clone(&shelf) as Arc<dyn Archive>);
            shelf.set(true);
            play.stream.split(None, "1");
            expire(&play, "1", "01A");
            play.change("1", "a", 6);
            expire(&play, "1", "01B");
            if is_closed {
                play.stream.split(Some("1"), "2");
                play.change("2", "a", 1);
            }
            let before = play.world.time.now();
            let drained = play.daemon().run(Until::Drained, std::future::pending()).await;
            assert!(drained.unwrap_err().message.contains("did not take 2 expired audit events"));
            let took = play.world.time.now().millis_since(before);
            assert!(took < 60_000, "{took} ms");
            let usage = if is_closed { 7 } else { 6 };
            assert_eq!((play.booked("a"), shelf.files()), (usage, 0));
            shelf.set(false);
            play.drain().await;
            assert_eq!((play.booked("a"), shelf.files()), (usage, 2));
        });
    }
}

#[test]
fn an_archive_that_is_down_for_a_day_is_reported_and_stops_nothing_for_ever() {
    play(async |mut play| {
        let shelf = Arc::new(Shelf::default());
        play.archive = Some(Arc::clone(&shelf) as Arc<dyn Archive>);
        shelf.set(true);
        play.stream.split(None, "1");
        expire(&play, "1", "01A");
        expire(&play, "1", "01B");
        play.change("1", "a", 5);
        play.stream.split(Some("1"), "2");
        let running = start(play.daemon());
        play.world.time.sleep(seconds(80_000)).await;
        // The closed stream shard is not done, but its child is read.
        play.change("2", "a", 1);
        play.world.time.sleep(seconds(30)).await;
        let unarchived = |play: &Play| {
            let notices = play.notices.lock().unwrap();
            let events = notices.iter().filter_map(|(_, notice)| match notice {
                Notice::Unarchived(lost) => Some((lost.shard.clone(), lost.events)),
                _ => None,
            });
            events.collect::<Vec<_>>()
        };
        assert_eq!((play.booked("a"), unarchived(&play)), (6, Vec::new()));
        assert_eq!(play.noticed(|_, notice| matches!(notice, Notice::Finished(_))), 0);
        play.world.time.sleep(seconds(7_000)).await;
        assert_eq!(unarchived(&play), [("1".to_owned(), 2)]);
        assert_eq!((play.booked("a"), running.metrics.times_missed()), (6, 1));
        assert_eq!(play.noticed(|_, notice| matches!(notice, Notice::Finished(_))), 1);
        drop(running);
    });
}
