//! When a daemon that drains its stream ends: after everything that the stream held at its start, and then.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::play::{Play, play};
use zae_limiter_aggregator::daemon::{Daemon, Notice, Stream, Until};
use zae_limiter_aggregator::{Aggregator, Settings};
use zae_limiter_core::Clock;
use zae_limiter_schema::Table;
use zae_limiter_testkit::ClientClock;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// "Until 100 pages in a row are empty": those before a failure and those after it are read from the same position.
#[test]
fn empty_pages_that_are_read_again_count_once() {
    play(async |mut play| {
        play.stream.split(None, "1");
        play.change("1", "a", 6);
        {
            let mut inside = play.stream.inside();
            inside.fails_at = vec![41, 82, 123];
            inside.shards.get_mut("1").unwrap().gap = 60;
        }
        play.drain().await;
        assert_eq!(play.booked("a"), 6);
    });
}

/// A daemon whose clock is off by so many days. The table has the true time.
fn daemon_with_a_wrong_clock(play: &Play, days: i64) -> Daemon {
    let clock =
        |offset| Arc::new(ClientClock::new(Arc::clone(&play.world.time), i64::MAX / 4, offset, 0));
    let wrong: Arc<dyn Clock> = clock(days * 86_400_000_000);
    let table = play.world.table.dated_for(clock(0), Arc::clone(&wrong)).for_client(7);
    let table: Arc<dyn Table> = Arc::new(table);
    let aggregator = Aggregator::new(Arc::clone(&table), Arc::clone(&wrong), Settings::default());
    let stream = Arc::clone(&play.stream) as Arc<dyn Stream>;
    Daemon::new(stream, table, wrong, aggregator, seconds(20), "wrong")
}

#[test]
fn a_drain_with_a_wrong_clock_processes_everything_and_ends() {
    for days in [-1, 0, 1] {
        play(async move |mut play| {
            play.stream.split(None, "1");
            play.change("1", "a", 40);
            let mut daemon = daemon_with_a_wrong_clock(&play, days);
            daemon.run(Until::Drained, std::future::pending()).await.unwrap();
            assert_eq!(play.booked("a"), 40, "{days} days off");

            // While clients use the table, there is no quiet moment.
            let (before, is_over) = (play.world.time.now(), Arc::new(AtomicBool::new(false)));
            let mut daemon = daemon_with_a_wrong_clock(&play, days);
            let ends = Arc::clone(&is_over);
            let task = tokio::spawn(async move {
                daemon.run(Until::Drained, std::future::pending()).await.unwrap();
                ends.store(true, Ordering::Relaxed);
            });
            for _ in 0..600 {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                play.change("1", "a", 1);
                play.world.time.sleep(seconds(1)).await;
            }
            let took = play.world.time.now().millis_since(before);
            assert!(is_over.load(Ordering::Relaxed), "{days} days off: {took} ms");
            task.abort();
        });
    }
}

#[test]
fn a_drain_takes_over_from_a_crashed_daemon_also_after_it_took_from_a_live_one() {
    play(async |mut play| {
        let shards = ["1", "2", "3", "4", "5", "6"];
        for shard in shards {
            play.stream.split(None, shard);
        }
        let mut live = play.daemon();
        let live = tokio::spawn(async move {
            live.run(Until::Stopped, std::future::pending()).await.unwrap();
        });
        play.world.time.sleep(seconds(8)).await;
        let mut crashes = play.daemon();
        let crashes = tokio::spawn(async move {
            crashes.run(Until::Stopped, std::future::pending()).await.unwrap();
        });
        let claimed = |play: &Play| {
            let notices = play.notices.lock().unwrap();
            notices.iter().find_map(|(client, notice)| match notice {
                Notice::Claimed(shard) if *client == 2 => Some(shard.clone()),
                _ => None,
            })
        };
        while claimed(&play).is_none() {
            play.world.time.sleep(Duration::from_millis(1)).await;
        }
        play.world.table.crash(2);
        crashes.abort();
        let shard = claimed(&play).unwrap();
        while play.noticed(|_, notice| *notice == Notice::Lost(shard.clone())) == 0 {
            play.world.time.sleep(Duration::from_millis(1)).await;
        }
        play.change(&shard, "a", 1);
        play.drain().await;
        assert_eq!(play.booked("a"), 1);
        live.abort();
    });
}
