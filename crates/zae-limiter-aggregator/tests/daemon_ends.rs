//! When a daemon that drains its stream ends: after everything that the stream held at its start, and then.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::time::Duration;

use common::play::{Play, play};
use zae_limiter_aggregator::daemon::{Notice, Until};

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
