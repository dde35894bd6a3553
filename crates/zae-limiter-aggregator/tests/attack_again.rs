//! More attacks on the promises of docs/aggregator.md: an archive that is down while the stream changes, old and new
//! records in one page, wrong clocks, streams that are switched while nobody or everybody reads.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::play::{FakeStream, Play, play, play_seed};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use zae_limiter_aggregator::daemon::{Daemon, Metrics, Missed, Notice, Stream, StreamError, Until};
use zae_limiter_aggregator::{Aggregator, Archive, ArchiveError, Settings};
use zae_limiter_core::{BoxFuture, Clock};
use zae_limiter_schema::{Item, ItemKey, Table, Value};
use zae_limiter_testkit::{Changed, ClientClock, Faults};

const HOUR: u64 = 3_600;
const LATER: &str = "2026-11-16T00:00:00.000";

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

fn given_up(play: &Play) -> usize {
    let notices = play.notices.lock().unwrap();
    let events = |(_, notice): &(u32, Notice)| match notice {
        Notice::Unarchived(lost) => lost.events,
        _ => 0,
    };
    notices.iter().map(events).sum()
}

/// An archive that can be down. It keeps the names of its files.
#[derive(Debug, Default)]
struct Shelf {
    is_down: AtomicBool,
    files: Mutex<BTreeSet<String>>,
}

impl Shelf {
    fn for_play(play: &mut Play) -> Arc<Self> {
        let shelf = Arc::new(Self::default());
        play.archive = Some(Arc::clone(&shelf) as Arc<dyn Archive>);
        shelf.set(true);
        shelf
    }

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

fn usage_of_month(play: &Play, entity: &str, month: &str) -> i64 {
    let key = ItemKey::new(format!("abcdefghijk/ENTITY#{entity}"), format!("#USAGE#gpt-4#{month}"));
    let usage = play.world.table.item(&key).unwrap_or_default();
    usage.get("rpm").and_then(Value::as_i64).unwrap_or_default()
}

/// The table's stream is disabled and enabled again.
fn switch(play: &mut Play, shards: &[&str]) {
    let next = Arc::new(FakeStream::labelled(LATER));
    for shard in shards {
        next.split(None, shard);
    }
    let mut inside = play.stream.inside();
    inside.shards.values_mut().for_each(|shard| shard.closed = true);
    inside.next = Some(Arc::clone(&next));
    drop(inside);
    play.stream = next;
}

/// "Usage does not wait for the archive." The stream is disabled and enabled while the archive is down.
#[test]
fn an_archive_that_is_down_holds_up_no_usage_of_the_next_stream() {
    for daemons in [1, 2] {
        play(async move |mut play| {
            let shelf = Shelf::for_play(&mut play);
            play.stream.split(None, "1");
            expire(&play, "1", "01A");
            play.change("1", "a", 3);
            let running: Vec<Running> = (0..daemons).map(|_| start(play.daemon())).collect();
            play.world.time.sleep(seconds(120)).await;
            assert_eq!((play.booked("a"), shelf.files()), (3, 0));
            switch(&mut play, &["9"]);
            play.change("9", "a", 4);
            play.world.time.sleep(seconds(1_800)).await;
            let while_down = play.booked("a");
            shelf.set(false);
            play.world.time.sleep(seconds(300)).await;
            assert_eq!((play.booked("a"), shelf.files()), (7, 1));
            assert_eq!(while_down, 7, "usage of the next stream waited for the archive");
            drop(running);
        });
    }
}

/// Two daemons keep the events of one stream shard each. Then the stream is switched. The archive is down.
async fn two_daemons_keep_events_of_the_last_stream(play: &mut Play) -> (Arc<Shelf>, [Running; 2]) {
    let shelf = Shelf::for_play(play);
    play.stream.split(None, "1");
    play.stream.split(None, "2");
    let running = [start(play.daemon()), start(play.daemon())];
    play.world.time.sleep(seconds(60)).await;
    for (shard, event) in [("1", "01A"), ("2", "01B")] {
        play.change(shard, "a", 1);
        expire(play, shard, event);
        play.change(shard, "a", 2);
    }
    play.world.time.sleep(seconds(60)).await;
    assert_eq!((play.booked("a"), shelf.files()), (6, 0));
    FIRST.with(|first| *first.borrow_mut() = Some(Arc::clone(&play.stream)));
    switch(play, &["9"]);
    play.change("9", "a", 4);
    play.world.time.sleep(seconds(120)).await;
    (shelf, running)
}

#[test]
fn daemons_that_keep_events_follow_the_next_stream_together() {
    play(async |mut play| {
        let (shelf, running) = two_daemons_keep_events_of_the_last_stream(&mut play).await;
        assert_eq!(play.booked("a"), 10, "usage of the next stream waits for the archive");
        assert_eq!(play.noticed(|_, notice| matches!(notice, Notice::NextStream(_))), 2);
        // One more comes, and reads what they keep, or not.
        let third = start_first(&mut play);
        play.world.time.sleep(seconds(60)).await;
        assert_eq!(play.noticed(|_, notice| matches!(notice, Notice::NextStream(_))), 3);
        shelf.set(false);
        play.world.time.sleep(seconds(300)).await;
        assert_eq!((shelf.files(), given_up(&play), missed(&play)), (2, 0, vec![]));
        for one in running.into_iter().chain([third]) {
            one.end().await;
        }
        FIRST.with(|first| *first.borrow_mut() = None);
    });
}

/// "After a crash they are read again", also from the stream before.
#[test]
fn events_of_the_last_stream_are_read_again_after_a_crash() {
    for restarts in [true, false] {
        play(async move |mut play| {
            let (shelf, [first, second]) =
                two_daemons_keep_events_of_the_last_stream(&mut play).await;
            play.world.table.crash(1);
            first.task.abort();
            play.world.time.sleep(seconds(600)).await;
            let third = restarts.then(|| start_first(&mut play));
            play.world.time.sleep(seconds(120)).await;
            play.change("9", "a", 1);
            shelf.set(false);
            play.world.time.sleep(seconds(300)).await;
            let found = (shelf.files(), given_up(&play), missed(&play), play.booked("a"));
            assert_eq!(found, (2, 0, vec![], 11), "restarts: {restarts}");
            drop((second, third));
            FIRST.with(|first| *first.borrow_mut() = None);
        });
    }
}

/// Two stream shards, each with an expired event that one daemon cannot archive. A second daemon, which has no archive,
/// takes one of them.
async fn second_daemon_without_an_archive(play: &mut Play) -> (Arc<Shelf>, Running, Running) {
    let shelf = Shelf::for_play(play);
    for (shard, event) in [("1", "01A"), ("2", "01B")] {
        play.stream.split(None, shard);
        expire(play, shard, event);
        play.change(shard, "a", 2);
    }
    let first = start(play.daemon());
    play.world.time.sleep(seconds(120)).await;
    play.archive = None;
    let second = start(play.daemon());
    play.world.time.sleep(seconds(60)).await;
    assert_eq!(play.noticed(|by, notice| by == 2 && matches!(notice, Notice::Claimed(_))), 1);
    play.change("2", "a", 1);
    play.world.time.sleep(seconds(60)).await;
    (shelf, first, second)
}

/// "The position in the table stays before the events", also if the daemon that reads them has no archive.
#[test]
fn a_daemon_without_an_archive_leaves_the_events_to_those_that_have_one() {
    play(async |mut play| {
        let (shelf, first, second) = second_daemon_without_an_archive(&mut play).await;
        shelf.set(false);
        play.world.time.sleep(seconds(300)).await;
        assert_eq!((shelf.files(), play.booked("a")), (1, 5), "usage goes on");
        assert!(second.metrics.figures()["errors"] > 3, "it says so");
        second.end().await;
        play.world.time.sleep(seconds(60)).await;
        assert_eq!((shelf.files(), given_up(&play), missed(&play)), (2, 0, vec![]));
        first.end().await;
    });
}

#[test]
fn events_that_a_daemon_without_an_archive_keeps_for_a_day_are_reported() {
    play(async |mut play| {
        let (shelf, first, second) = second_daemon_without_an_archive(&mut play).await;
        shelf.set(false);
        play.world.time.sleep(seconds(300)).await;
        // The only one with an archive ends. Its own stream shard has one more event.
        first.end().await;
        expire(&play, "1", "01C");
        play.world.time.sleep(seconds(25 * HOUR)).await;
        assert_eq!((shelf.files(), given_up(&play), play.booked("a")), (1, 2, 5));
        assert_eq!(second.metrics.times_missed(), 2);
        // Two days later it is clear that this table has no archive any more.
        play.world.time.sleep(seconds(25 * HOUR)).await;
        let errors = second.metrics.figures()["errors"];
        expire(&play, "1", "01D");
        play.change("1", "b", 1);
        play.world.time.sleep(seconds(120)).await;
        assert_eq!((second.metrics.figures()["errors"], play.booked("b")), (errors, 1));
        second.end().await;
    });
}

#[test]
fn a_drain_without_an_archive_ends_with_an_error_where_others_archive() {
    play(async |mut play| {
        // Nobody archives: nothing is missing.
        play.stream.split(None, "1");
        expire(&play, "1", "01A");
        play.change("1", "a", 1);
        play.drain().await;
        assert_eq!(play.booked("a"), 1);
        let shelf = Shelf::for_play(&mut play);
        play.drain().await;
        expire(&play, "1", "01B");
        play.stream.split(Some("1"), "2");
        expire(&play, "2", "01C");
        play.change("2", "a", 1);
        let archive = play.archive.take();
        let drained = play.daemon().run(Until::Drained, std::future::pending()).await;
        let message = drained.unwrap_err().message;
        assert!(message.contains("2 expired audit events") && message.contains("--archive"));
        assert_eq!(play.booked("a"), 2);
        play.archive = archive;
        shelf.set(false);
        play.drain().await;
        assert_eq!((shelf.files(), missed(&play)), (2, vec![]));
    });
}

/// "When the stream has deleted the events after 24 hours, the daemon gives up": not before. One page has a change that
/// is nearly a day old, and an event that has just expired.
#[test]
fn an_event_in_the_page_of_an_old_change_is_not_given_up() {
    play(async |mut play| {
        let shelf = Shelf::for_play(&mut play);
        play.stream.split(None, "1");
        play.change("1", "a", 1);
        play.world.time.sleep(seconds(23 * HOUR + 3_000)).await;
        expire(&play, "1", "01A");
        let running = start(play.daemon());
        // The change leaves the stream.
        play.world.time.sleep(seconds(900)).await;
        shelf.set(false);
        play.world.time.sleep(seconds(300)).await;
        assert_eq!(
            (given_up(&play), shelf.files()),
            (0, 1),
            "the event is a quarter of an hour old"
        );
        running.end().await;
    });
}

/// "The table's dates correct it": a daemon whose clock is wrong gives up no event, misses nothing, and reports nothing.
#[test]
fn a_daemon_with_a_wrong_clock_gives_up_nothing_early() {
    for days in [-400, -2, 2, 400] {
        play(async move |mut play| {
            let shelf = Shelf::for_play(&mut play);
            play.stream.split(None, "1");
            play.change("1", "a", 1);
            expire(&play, "1", "01A");
            let time = || Arc::clone(&play.world.time);
            let clock = |offset| Arc::new(ClientClock::new(time(), i64::MAX / 4, offset, 0));
            let wrong: Arc<dyn Clock> = clock(days * 86_400_000_000);
            let table = play.world.table.dated_for(clock(0), Arc::clone(&wrong)).for_client(7);
            let table: Arc<dyn Table> = Arc::new(table);
            let aggregator =
                Aggregator::new(Arc::clone(&table), Arc::clone(&wrong), Settings::default());
            let aggregator = aggregator.archive(Arc::clone(&shelf) as Arc<dyn Archive>);
            let stream = Arc::clone(&play.stream) as Arc<dyn Stream>;
            let daemon = Daemon::new(stream, table, wrong, aggregator, seconds(20), "wrong");
            let notices = Arc::clone(&play.notices);
            let daemon =
                daemon.on_notice(Arc::new(move |notice| notices.lock().unwrap().push((7, notice))));
            let running = start(daemon);
            play.world.time.sleep(seconds(600)).await;
            shelf.set(false);
            play.world.time.sleep(seconds(300)).await;
            let found = (play.booked("a"), given_up(&play), shelf.files(), missed(&play));
            assert_eq!(found, (1, 0, 1, vec![]), "{days} days off");
            assert_eq!(running.metrics.times_missed(), 0);
            // "The daemon knows what it has missed for 30 days": not less, by the true time.
            let item = play.world.table.item(&ItemKey::new("_/SYSTEM#", "#STREAM#1")).unwrap();
            let expiry = item.get("ttl").and_then(Value::as_i64).unwrap();
            let now = play.world.time.now().as_millis() / 1_000;
            assert!((29..=31).contains(&((expiry - now) / 86_400)), "{days} days off: {item:?}");
            running.end().await;
        });
    }
}

/// Unread changes of a stream that was disabled while no daemon ran are booked or reported, also if its stream shards
/// are gone and the next stream begins a day later.
#[test]
fn a_stream_that_is_switched_while_no_daemon_runs_is_reported() {
    for (id, pause) in [("9", 60), ("9", 30 * HOUR), ("9", 25 * 24 * HOUR)] {
        play(async move |mut play| {
            play.stream.split(None, "1");
            play.change("1", "a", 3);
            play.drain().await;
            play.change("1", "a", 2);
            switch(&mut play, &[id]);
            play.world.time.sleep(seconds(pause)).await;
            play.change(id, "b", 4);
            play.drain().await;
            let month = usage_of_month(
                &play,
                "b",
                if pause > 20 * 24 * HOUR { "2026-12" } else { "2026-11" },
            );
            assert_eq!((play.booked("a"), month), (3, 4), "{pause}");
            // After a day, the new stream shard may lack some, too.
            let reports = if pause < 24 * HOUR { 1 } else { 2 };
            assert_eq!(missed(&play).len(), reports, "{id} {pause}: {:?}", missed(&play));
            play.drain().await;
            assert_eq!(missed(&play).len(), reports, "{id} {pause}: it is reported once");
        });
    }
}

/// A stream shard leaves the stream while its daemon keeps events of it: they are archived, and what was unread is reported.
#[test]
fn a_stream_shard_that_goes_while_its_events_wait_for_the_archive_loses_none() {
    play(async |mut play| {
        let shelf = Shelf::for_play(&mut play);
        play.stream.split(None, "1");
        expire(&play, "1", "01A");
        play.change("1", "a", 3);
        let running = start(play.daemon());
        play.world.time.sleep(seconds(60)).await;
        play.stream.split(Some("1"), "2");
        play.stream.inside().shards.remove("1");
        play.change("2", "a", 1);
        play.world.time.sleep(seconds(300)).await;
        assert_eq!((play.booked("a"), shelf.files()), (4, 0));
        shelf.set(false);
        play.world.time.sleep(seconds(120)).await;
        assert_eq!((shelf.files(), given_up(&play), missed(&play).len()), (1, 0, 1));
        running.end().await;
    });
}

/// The same, but the daemon ends, and the next one finds neither the stream shard nor its events: it says so.
#[test]
fn events_that_nobody_can_read_again_are_reported() {
    for crash in [false, true] {
        play(async move |mut play| {
            let shelf = Shelf::for_play(&mut play);
            play.stream.split(None, "1");
            expire(&play, "1", "01A");
            play.change("1", "a", 3);
            let running = start(play.daemon());
            play.world.time.sleep(seconds(60)).await;
            match crash {
                true => running.task.abort(),
                false => running.end().await,
            }
            play.stream.split(Some("1"), "2");
            play.world.time.sleep(seconds(25 * HOUR)).await;
            play.stream.inside().shards.remove("1");
            play.change("2", "a", 1);
            shelf.set(false);
            play.drain().await;
            assert_eq!((play.booked("a"), shelf.files()), (4, 0));
            assert_eq!(missed(&play).len(), 1, "crash {crash}: an event is lost silently");
        });
    }
}

/// Three daemons and the function on a slow and faulty table; stream shards split, the stream is switched, daemons die.
/// Every change counts once, and nothing is reported as missed.
#[test]
fn three_daemons_and_a_function_survive_a_switched_stream() {
    for seed in 1..=25 {
        play_seed(seed, async move |mut play| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut open: Vec<String> = vec!["1".to_owned(), "2".to_owned()];
            for shard in &open {
                play.stream.split(None, shard);
            }
            // Each entity's changes are in one line of stream shards, as each item's are.
            let mut used = [0_u64; 2];
            let mut next_id = 3;
            let mut daemons: Vec<Running> = (0..3).map(|_| start(play.daemon())).collect();
            for round in 0..60 {
                play.world.table.set_faults(Faults {
                    lost_request: 0.05,
                    lost_answer: 0.05,
                    hung: 0.02,
                    slow: 0.05,
                    slow_us: 1_000_000..=15_000_000,
                    ..Faults::delay(rng.u64(500..100_000))
                });
                for at in 0..2 {
                    let times = rng.u64(0..6);
                    let shard = open[at].clone();
                    play.change(&shard, ["a", "b"][at], times);
                    used[at] += times;
                }
                match rng.u8(0..8) {
                    0 => {
                        let at = rng.usize(0..2);
                        let child = next_id.to_string();
                        next_id += 1;
                        let parent = std::mem::replace(&mut open[at], child.clone());
                        play.stream.split(Some(&parent), &child);
                    }
                    1 if !daemons.is_empty() => {
                        let victim = daemons.swap_remove(rng.usize(..daemons.len()));
                        match rng.bool() {
                            true => victim.task.abort(),
                            false => victim.end().await,
                        }
                        daemons.push(start_first(&mut play));
                    }
                    _ => {}
                }
                if round == 30 {
                    let ids = [next_id.to_string(), (next_id + 1).to_string()];
                    next_id += 2;
                    FIRST.with(|first| *first.borrow_mut() = Some(Arc::clone(&play.stream)));
                    switch(&mut play, &[&ids[0], &ids[1]]);
                    open = ids.to_vec();
                }
                play.world.time.sleep(Duration::from_millis(rng.u64(100..20_000))).await;
            }
            FIRST.with(|first| *first.borrow_mut() = None);
            play.world.table.set_faults(Faults::delay(500));
            play.world.time.sleep(seconds(300)).await;
            let booked = [play.booked("a"), play.booked("b")].map(i64::unsigned_abs);
            assert_eq!(booked, used, "seed {seed}");
            assert_eq!(missed(&play), [], "seed {seed}");
        });
    }
}

thread_local! {
    /// The stream before the switch: a new daemon starts with the oldest one that exists.
    static FIRST: std::cell::RefCell<Option<Arc<FakeStream>>> = const { std::cell::RefCell::new(None) };
}

/// Starts a daemon with the oldest stream.
fn start_first(play: &mut Play) -> Running {
    let Some(first) = FIRST.with(|first| first.borrow().clone()) else {
        return start(play.daemon());
    };
    let latest = std::mem::replace(&mut play.stream, first);
    let daemon = play.daemon();
    play.stream = latest;
    start(daemon)
}
