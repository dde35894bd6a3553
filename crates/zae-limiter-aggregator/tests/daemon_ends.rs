//! When a daemon that drains its stream ends: after everything that the stream held at its start, and then.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use common::play::play;

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
