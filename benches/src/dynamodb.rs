//! The DynamoDB store on a local endpoint, compared with bare calls of the SDK and, optionally, the
//! Python client.
//!
//!     cargo build --release --manifest-path local/Cargo.toml
//!     eval "$(crates/zae-limiter-dynamodb/tests/interop/venvs)"
//!     ZAEL_PYTHON=$ZAEL_PYTHON_0_17_0 cargo run --release --manifest-path benches/Cargo.toml dynamodb
//!
//! `--seconds N` sets the time for each figure (default 3). `ZAEL_LOCAL` names another program for the
//! endpoint. Without `ZAEL_PYTHON` the Python client is not measured. The store is measured twice: on its
//! own runtime, and with `DynamoOptions::runtime` on the callers' runtime, which saves passing calls
//! between threads. Endpoint and clients share the machine. Each figure is the sum of several rounds in
//! which all contenders take turns, so that other load on the machine affects all of them.

mod canned;
mod contenders;
mod processes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use zae_limiter_dynamodb::DynamoOptions;

use crate::measure::keys;
use crate::report::{Report, grouped};
pub use canned::profile;
use contenders::{Bare, Contender, Fleet, Ours, Python};
use processes::{Endpoint, cpu_of};

const ENTITIES: usize = 1_000;
const ROUNDS: u32 = 4;

/// The sums of one contender.
#[derive(Clone, Copy, Default)]
struct Tally {
    calls: u64,
    seconds: f64,
    /// CPU seconds of the client's process.
    client_cpu: f64,
    /// CPU seconds of the endpoint's process.
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

/// The sums of all contenders, in the same time.
#[derive(Default)]
struct Row {
    bare: Tally,
    returned: Tally,
    ours: Tally,
    /// With [`DynamoOptions::runtime`]: on the callers' runtime instead of the store's own.
    here: Tally,
    python: Option<Tally>,
}

pub fn run(seconds: Duration, report: &mut Report) -> Result<(), String> {
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
    report.title("DynamoDB: acquires per second on one endpoint, two limits each");
    match &python {
        Some(python) => report.line(format!("With the Python client {}.\n", python.version)),
        None => report.line("Without the Python client: `ZAEL_PYTHON` is not set.\n"),
    }
    report.line(
        "| buckets | callers | bare `UpdateItem` | bare, item returned | zae-limiter | \
         callers' runtime | Python | zae-limiter : bare | zae-limiter : bare, item returned | \
         callers' runtime : bare, item returned | zae-limiter : Python | write units per acquire |",
    );
    report.line(
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    );
    let mut cpu = Vec::new();
    for buckets in [1, ENTITIES] {
        for callers in [1, 16, 64] {
            let cell = Cell { runtime: &runtime, endpoint: &endpoint, buckets, callers };
            let row = cell.measure(seconds / ROUNDS, &bare, [&ours, &here], python.as_mut())?;
            let Row { bare, returned, ours, here, python } = row;
            let to_python = python.map(|python| ours.per_second() / python.per_second());
            report.line(format!(
                "| {} | {callers} | {} | {} | {} | {} | {} | {:.2} | {:.2} | {:.2} | {} | {:.3} |",
                grouped(buckets as f64),
                grouped(bare.per_second()),
                grouped(returned.per_second()),
                grouped(ours.per_second()),
                grouped(here.per_second()),
                shown(python.map(|python| python.per_second()), 0),
                ours.per_second() / bare.per_second(),
                ours.per_second() / returned.per_second(),
                here.per_second() / returned.per_second(),
                shown(to_python, 1),
                ours.per_call(ours.write_units),
            ));
            let tallies = [Some(bare), Some(returned), Some(ours), Some(here), python];
            cpu.push((buckets, callers, tallies));
        }
    }
    report_cpu(&cpu, report);
    report_shards(&runtime, &endpoint, seconds, report);
    Ok(())
}

/// The same load on one bucket with 1 to 8 shards. The endpoint does not throttle, so the table only
/// shows less contention between processes.
fn report_shards(runtime: &Runtime, endpoint: &Endpoint, seconds: Duration, report: &mut Report) {
    let processes = Fleet::PROCESSES;
    report.line(format!(
        "\nOne bucket, {processes} processes with 64 callers in all, by the number of shards:\n"
    ));
    report.line("| shards | acquires per second | write units per acquire | client CPU, µs |");
    report.line("| ---: | ---: | ---: | ---: |");
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
        report.line(format!(
            "| {shards} | {} | {:.3} | {:.0} |",
            grouped(tally.per_second()),
            tally.per_call(tally.write_units),
            tally.per_call(tally.client_cpu) * 1e6,
        ));
    }
}

fn report_cpu(rows: &[(usize, usize, [Option<Tally>; 5])], report: &mut Report) {
    report.line("\nCPU microseconds per acquire, of the client's process and of the endpoint's:\n");
    report.line(
        "| buckets | callers | bare `UpdateItem` | bare, item returned | zae-limiter | \
         callers' runtime | Python | zae-limiter - bare, item returned | \
         callers' runtime - bare, item returned | Python : zae-limiter | endpoint, bare | \
         endpoint, bare, item returned | endpoint, zae-limiter | endpoint, Python |",
    );
    report.line(format!("|{}", " ---: |".repeat(14)));
    let micros = |of: fn(&Tally) -> f64| {
        move |tally: &Option<Tally>| tally.as_ref().map(|tally| tally.per_call(of(tally)) * 1e6)
    };
    for (buckets, callers, tallies) in rows {
        let client = tallies.each_ref().map(micros(|tally| tally.client_cpu));
        let endpoint = tallies.each_ref().map(micros(|tally| tally.endpoint_cpu));
        let ratio = client[4].zip(client[2]).map(|(python, ours)| python / ours);
        let above = |place: usize| shown(client[place].zip(client[1]).map(|(a, b)| a - b), 0);
        let above = [above(2), above(3)];
        let [bare, returned, ours, here, python] = client.map(|micros| shown(micros, 0));
        let [endpoint_bare, endpoint_returned, endpoint_ours, _, endpoint_python] =
            endpoint.map(|micros| shown(micros, 0));
        report.line(format!(
            "| {buckets} | {callers} | {bare} | {returned} | {ours} | {here} | {python} | {} | {} | {} | \
             {endpoint_bare} | {endpoint_returned} | {endpoint_ours} | {endpoint_python} |",
            above[0],
            above[1],
            shown(ratio, 1)
        ));
    }
}

fn shown(number: Option<f64>, digits: usize) -> String {
    number.map_or("-".to_owned(), |number| format!("{number:.digits$}"))
}

/// The parameters of one row.
struct Cell<'a> {
    runtime: &'a Runtime,
    endpoint: &'a Endpoint,
    buckets: usize,
    callers: usize,
}

impl Cell<'_> {
    /// Measures all contenders in turns.
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
