//! One run, one table: the limiter beside its peers and beside a baseline that no limiter can beat.
//!
//!     cargo run --release --manifest-path benches/Cargo.toml            # everything
//!     cargo run --release --manifest-path benches/Cargo.toml memory     # one shard: memory, sqlite, scale, aggregator
//!     cargo run --release --manifest-path benches/Cargo.toml dynamodb --seconds 3
//!
//! The shard `dynamodb` starts the endpoint in `local/`, which has to be built first, and is left out
//! of everything else; what it needs stands in `dynamodb.rs`.
//!
//! Figures of a shared machine move; ratios within one run are what counts. Each figure is the best
//! of several rounds.

#![allow(clippy::disallowed_methods, reason = "measuring is reading the clock")]

mod aggregator;
mod dynamodb;
mod measure;
mod memory;
mod peers;
mod scale;
mod sqlite;

use measure::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() {
    let shards: Vec<String> = std::env::args().skip(1).collect();
    let wants = |shard: &str| shards.is_empty() || shards.iter().any(|wanted| wanted == shard);
    if let Some("profile") = shards.first().map(String::as_str) {
        let peer = shards.get(1).map_or("zae-limiter", String::as_str);
        let keys = shards.get(2).and_then(|keys| keys.parse().ok()).unwrap_or(1);
        if peer == "sqlite" {
            return scale::profile(keys);
        }
        return memory::profile(peer, keys);
    }
    if let Some("dynamodb") = shards.first().map(String::as_str) {
        let done = dynamodb::seconds(&shards[1..]).and_then(dynamodb::run);
        return done.unwrap_or_else(|error| {
            eprintln!("error: {error}");
            std::process::exit(1);
        });
    }
    let known = ["memory", "sqlite", "scale", "aggregator"];
    if let Some(unknown) = shards.iter().find(|shard| !known.contains(&shard.as_str())) {
        eprintln!(
            "unknown shard {unknown:?}; use memory, sqlite, scale, aggregator, or dynamodb alone"
        );
        std::process::exit(2);
    }
    if wants("memory") {
        memory::run();
    }
    if wants("sqlite") {
        sqlite::run();
    }
    if wants("scale") {
        scale::run();
    }
    if wants("aggregator") {
        aggregator::run();
    }
}
