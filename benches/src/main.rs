//! Measures the limiter in one run with other limiters, and with a baseline that no limiter can beat.
//!
//!     cargo run --release --manifest-path benches/Cargo.toml                 # all but dynamodb
//!     cargo run --release --manifest-path benches/Cargo.toml -- memory       # one section
//!     cargo run --release --manifest-path benches/Cargo.toml -- dynamodb --seconds 3
//!     cargo run --release --manifest-path benches/Cargo.toml -- --write docs/benchmarks.md
//!
//! Sections: memory, sqlite, scale, aggregator, dynamodb. `--write` also replaces the sections' blocks
//! in a Markdown page. The section dynamodb needs the endpoint of `local/`: see `dynamodb.rs`.
//!
//! Figures from a shared machine vary. Compare ratios within one run. Each figure is the best of
//! several rounds.

#![allow(clippy::disallowed_methods, reason = "measuring is reading the clock")]

mod aggregator;
mod arguments;
mod dynamodb;
mod measure;
mod memory;
mod page;
mod peers;
mod report;
mod scale;
mod sqlite;

use std::process::ExitCode;

use arguments::{Arguments, Section};
use measure::CountingAllocator;
use page::Page;
use report::Report;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == "profile") {
        profile(&words[1..]);
        return ExitCode::SUCCESS;
    }
    let (message, status) = match Arguments::parse(&words).map(|arguments| run(&arguments, &words))
    {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(message)) => (message, 1),
        Err(message) => (message, 2),
    };
    eprintln!("error: {message}");
    ExitCode::from(status)
}

fn run(arguments: &Arguments, words: &[String]) -> Result<(), String> {
    // Opened first: a missing block must not fail after minutes of measuring.
    let page = arguments.write.as_ref().map(|file| Page::open(file, &arguments.sections));
    let page = page.transpose()?;
    for section in &arguments.sections {
        let mut report = Report::new(words);
        match section {
            Section::Memory => memory::run(&mut report),
            Section::Sqlite => sqlite::run(&mut report),
            Section::Scale => scale::run(&mut report),
            Section::Aggregator => aggregator::run(&mut report),
            Section::Dynamodb => dynamodb::run(arguments.seconds, &mut report)?,
        }
        if let Some(page) = &page {
            page.replace(*section, &report.block())?;
        }
    }
    Ok(())
}

/// `profile [PEER] [KEYS]`: only the measured calls, for `valgrind --tool=callgrind` or `perf`.
fn profile(words: &[String]) {
    let peer = words.first().map_or("zae-limiter", String::as_str);
    let keys = words.get(1).and_then(|keys| keys.parse().ok()).unwrap_or(1);
    match peer {
        "sqlite" => scale::profile(keys),
        "bare" | "add" | "refill" => dynamodb::profile(peer, keys),
        peer => memory::profile(peer, keys),
    }
}
