//! The DynamoDB store on an endpoint of this machine, beside bare calls of the SDK and, if it is
//! there, the Python client.
//!
//!     cargo build --release --manifest-path local/Cargo.toml
//!     eval "$(crates/zae-limiter-dynamodb/tests/interop/venvs)"
//!     ZAEL_PYTHON=$ZAEL_PYTHON_0_17_0 cargo run --release --manifest-path benches/Cargo.toml dynamodb
//!
//! `--seconds N` is the time for each figure (3), `ZAEL_LOCAL` names another endpoint's program, and
//! without `ZAEL_PYTHON` the Python client is left out. Ours is measured twice: on a runtime of the store's
//! own, and with `DynamoOptions::runtime` on that of the callers, which saves handing calls over. Endpoint and clients share the machine. Each
//! figure is gathered in several rounds, and all who are compared take turns in them, so that what
//! else happens on the machine happens to all of them.

mod contenders;
mod processes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use zae_limiter_dynamodb::DynamoOptions;

use crate::measure::keys;
use contenders::{Bare, Contender, Fleet, Ours, Python};
use processes::{Endpoint, cpu_of};

const ENTITIES: usize = 1_000;
const ROUNDS: u32 = 4;

/// The time for each figure, from what was typed.
pub fn seconds(typed: &[String]) -> Result<Duration, String> {
    let number = match typed {
        [] => Some(3.0),
        [option, number] if option == "--seconds" => number.parse().ok(),
        _ => None,
    };
    let number = number.filter(|number: &f64| (0.1..=3_600.0).contains(number));
    number.map(Duration::from_secs_f64).ok_or("use dynamodb [--seconds N]".to_owned())
}

/// What somebody got done.
#[derive(Clone, Copy, Default)]
struct Tally {
    calls: u64,
    seconds: f64,
    /// CPU seconds of the client and of the endpoint.
    client_cpu: f64,
    endpoint_cpu: f64,
    write_units: f64,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.seconds += other.seconds;
        self.client_cpu += other.client_cpu;
        self.endpoint_cpu += other.endpoint_cpu;
        self.write_units += other.write_units;
    }

    fn per_second(&self) -> f64 {
        self.calls as f64 / self.seconds
    }

    fn per_call(&self, sum: f64) -> f64 {
        sum / self.calls as f64
    }
}

/// What all of them got done, in the same time.
#[derive(Default)]
struct Row {
    bare: Tally,
    returned: Tally,
    ours: Tally,
    /// Ours with [`DynamoOptions::runtime`]: on the callers' runtime instead of one of its own.
    here: Tally,
    python: Option<Tally>,
}

pub fn run(seconds: Duration) -> Result<(), String> {
    let builder = &mut tokio::runtime::Builder::new_multi_thread();
    let runtime =
        builder.worker_threads(2).enable_all().build().map_err(|error| error.to_string())?;
    let endpoint = Endpoint::start()?;
    runtime.block_on(contenders::create_table(&endpoint.url));
    let open = |keys, options| runtime.block_on(Ours::open(&endpoint.url, keys, options));
    let ours = open(keys(ENTITIES), DynamoOptions::default());
    let others = keys(ENTITIES).iter().map(|key| format!("here-{key}")).collect();
    let here = open(others, DynamoOptions::default().runtime(runtime.handle().clone()));
    let bare = runtime.block_on(Bare::beside(&endpoint.url, ENTITIES));
    let mut python = Python::start(&endpoint.url, ENTITIES)?;
    println!("\n## DynamoDB: acquires per second on one endpoint, two limits each\n");
    match &python {
        Some(python) => println!("Python client {}\n", python.version),
        None => println!("without the Python client: ZAEL_PYTHON names no interpreter\n"),
    }
    println!(
        "| buckets | callers | bare UpdateItem | the same, item returned | ours | \
         ours, callers' runtime | Python | ours : bare | ours : bare, item returned | \
         callers' runtime : bare | ours : Python | write units per acquire |"
    );
    println!(
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    );
    let mut cpu = Vec::new();
    for buckets in [1, ENTITIES] {
        for callers in [1, 16, 64] {
            let cell = Cell { runtime: &runtime, endpoint: &endpoint, buckets, callers };
            let row = cell.measure(seconds / ROUNDS, &bare, [&ours, &here], python.as_mut())?;
            let Row { bare, returned, ours, here, python } = row;
            let to_python = python.map(|python| ours.per_second() / python.per_second());
            println!(
                "| {buckets} | {callers} | {:.0} | {:.0} | {:.0} | {:.0} | {} | {:.2} | {:.2} | \
                 {:.2} | {} | {:.3} |",
                bare.per_second(),
                returned.per_second(),
                ours.per_second(),
                here.per_second(),
                shown(python.map(|python| python.per_second()), 0),
                ours.per_second() / bare.per_second(),
                ours.per_second() / returned.per_second(),
                here.per_second() / bare.per_second(),
                shown(to_python, 1),
                ours.per_call(ours.write_units),
            );
            cpu.push((buckets, callers, [Some(bare), Some(ours), Some(here), python]));
        }
    }
    print_cpu(&cpu);
    print_shards(&runtime, &endpoint, seconds);
    Ok(())
}

/// The same load on one bucket as a whole, and in shards. An endpoint has no partitions that could be
/// too busy: what is seen is that processes are less in each other's way.
fn print_shards(runtime: &Runtime, endpoint: &Endpoint, seconds: Duration) {
    let processes = Fleet::PROCESSES;
    println!("\nOne bucket, {processes} processes with 64 callers in all, split into shards:\n");
    println!("| shards | acquires per second | write units per acquire | client CPU us |");
    println!("| ---: | ---: | ---: | ---: |");
    let cell = Cell { runtime, endpoint, buckets: processes, callers: 64 };
    let shards = [1, 2, 4, 8];
    let fleets = shards.map(|shards| runtime.block_on(Fleet::open(&endpoint.url, shards)));
    let mut tallies = shards.map(|_| Tally::default());
    for _ in 0..ROUNDS {
        for (fleet, tally) in fleets.iter().zip(&mut tallies) {
            tally.add(cell.round(seconds / ROUNDS, fleet));
        }
    }
    for (shards, tally) in shards.iter().zip(tallies) {
        println!(
            "| {shards} | {:.0} | {:.3} | {:.0} |",
            tally.per_second(),
            tally.per_call(tally.write_units),
            tally.per_call(tally.client_cpu) * 1e6,
        );
    }
}

fn print_cpu(rows: &[(usize, usize, [Option<Tally>; 4])]) {
    println!("\nCPU microseconds per acquire, of the client's process and of the endpoint's:\n");
    println!(
        "| buckets | callers | bare UpdateItem | ours | ours, callers' runtime | Python | \
         Python : ours | endpoint, bare | endpoint, ours | endpoint, Python |"
    );
    println!("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    let micros = |of: fn(&Tally) -> f64| {
        move |tally: &Option<Tally>| tally.as_ref().map(|tally| tally.per_call(of(tally)) * 1e6)
    };
    for (buckets, callers, tallies) in rows {
        let client = tallies.each_ref().map(micros(|tally| tally.client_cpu));
        let endpoint = tallies.each_ref().map(micros(|tally| tally.endpoint_cpu));
        let ratio = client[3].zip(client[1]).map(|(python, ours)| python / ours);
        let [bare, ours, here, python] = client.map(|micros| shown(micros, 0));
        let [endpoint_bare, endpoint_ours, _, endpoint_python] =
            endpoint.map(|micros| shown(micros, 0));
        println!(
            "| {buckets} | {callers} | {bare} | {ours} | {here} | {python} | {} | \
             {endpoint_bare} | {endpoint_ours} | {endpoint_python} |",
            shown(ratio, 1)
        );
    }
}

fn shown(number: Option<f64>, digits: usize) -> String {
    number.map_or("-".to_owned(), |number| format!("{number:.digits$}"))
}

/// One line of the table.
struct Cell<'a> {
    runtime: &'a Runtime,
    endpoint: &'a Endpoint,
    buckets: usize,
    callers: usize,
}

impl Cell<'_> {
    /// Bare calls, bare calls that return the item, ours on either runtime, Python's: in turns.
    fn measure(
        &self,
        time: Duration,
        bare: &Arc<Bare>,
        [ours, here]: [&Arc<Ours>; 2],
        mut python: Option<&mut Python>,
    ) -> Result<Row, String> {
        let mut row = Row::default();
        for _ in 0..ROUNDS {
            row.bare.add(self.round(time, &bare.returning_nothing()));
            row.returned.add(self.round(time, &bare.returning_the_item()));
            row.ours.add(self.round(time, ours));
            row.here.add(self.round(time, here));
            if let Some(python) = python.as_deref_mut() {
                let before = self.endpoint.cpu();
                let mut tally = python.round(self.buckets, self.callers, time)?;
                tally.endpoint_cpu = self.endpoint.cpu() - before;
                row.python.get_or_insert_default().add(tally);
            }
        }
        Ok(row)
    }

    fn round<C: Contender>(&self, time: Duration, contender: &Arc<C>) -> Tally {
        let me = std::process::id();
        let (client, endpoint) = (cpu_of(me), self.endpoint.cpu());
        let units = contender.write_units();
        let started = Instant::now();
        let calls = contenders::call_for(self.runtime, time, contender, self.buckets, self.callers);
        Tally {
            calls,
            seconds: started.elapsed().as_secs_f64(),
            client_cpu: cpu_of(me) - client,
            endpoint_cpu: self.endpoint.cpu() - endpoint,
            write_units: contender.write_units() - units,
        }
    }
}
