//! Daemons, loads, kills, an endpoint that hangs and a disk that is full, for minutes of real time. At the end usage
//! equals what the buckets have counted, nothing was over-admitted, memory has not grown, and the log kept its bound.
//!
//! It needs root, for a small file system of its own:
//!
//! ```text
//! ZAEL_SOAK_MINUTES=30 cargo test --release -p zae-limiter-cli --features endpoint-tests --test soak -- --ignored --nocapture
//! ```
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test says what is wrong by panicking; this one measures in real time"
)]

#[path = "endpoint/mod.rs"]
mod endpoint;
#[path = "../../zae-limiter-dynamodb/tests/endpoint/proxy.rs"]
#[allow(dead_code, reason = "shared with tests that need more of it")]
mod proxy;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use proxy::{Mode, Proxy};
use serde_json::Value as Json;
use zae_limiter::dynamodb::aws::DynamoAddress;

const TABLE: &str = "soak";
const ENTITIES: [&str; 4] = ["key-0", "key-1", "key-2", "key-3"];
/// The size of the file system of the SQLite file.
const DISK: &str = "size=400m";
/// What `docs/sqlite-format.md` promises for the log.
const LOG_MIB_MAX: f64 = 256.0;

fn second() -> Duration {
    Duration::from_secs(1)
}

/// When things happen, by the time since the start.
#[derive(Clone, Copy)]
struct Plan {
    began: Instant,
    whole: Duration,
    /// How long the endpoint hangs, and the disk is full.
    fault: Duration,
}

impl Plan {
    fn new() -> Self {
        let minutes = std::env::var("ZAEL_SOAK_MINUTES").ok().and_then(|text| text.parse().ok());
        let whole = Duration::from_secs_f64(minutes.unwrap_or(30.0) * 60.0);
        Self { began: Instant::now(), whole, fault: Duration::from_secs(60).min(whole / 6) }
    }

    fn is_over(&self) -> bool {
        self.began.elapsed() >= self.whole
    }
}

/// The program, on a store.
#[derive(Clone)]
struct Program {
    store: String,
    home: PathBuf,
}

impl Program {
    fn start(&self, args: &[&str]) -> Child {
        Command::new(env!("CARGO_BIN_EXE_zae-limiter"))
            .env_clear()
            .env("HOME", &self.home)
            .env("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
            .env("AWS_SECRET_ACCESS_KEY", "local")
            .args(["--store", &self.store])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn json(&self, args: &[&str]) -> Json {
        let output = self.start(&[args, &["-o", "json"]].concat()).wait_with_output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }

    fn daemon(&self, metrics: &str) -> Child {
        let mut daemon = self.start(&["aggregate", "--takeover-after", "5s", "--metrics", metrics]);
        // Somebody must read what it prints.
        for lines in [
            Box::new(daemon.stderr.take().unwrap()) as Box<dyn std::io::Read + Send>,
            Box::new(daemon.stdout.take().unwrap()),
        ] {
            spawn(move || BufReader::new(lines).lines().map_while(Result::ok).for_each(drop));
        }
        daemon
    }
}

/// The resident memory of a process in MiB.
fn memory(process: &Child) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse::<f64>().ok().map(|kib| kib / 1024.0)
}

/// A measure over the time of the run.
#[derive(Debug, Default)]
struct Series(Vec<f64>);

impl Series {
    /// The largest of a quarter of the run.
    fn of_quarter(&self, quarter: usize) -> f64 {
        let (from, to) = (self.0.len() * quarter / 4, self.0.len() * (quarter + 1) / 4);
        self.0[from..to].iter().copied().fold(0.0, f64::max)
    }

    fn words(&self) -> String {
        let quarters: Vec<String> =
            (0..4).map(|quarter| format!("{:.1}", self.of_quarter(quarter))).collect();
        format!("{} by quarter of the run", quarters.join(", "))
    }
}

#[derive(Debug, Default)]
struct Figures {
    loads: u64,
    admitted: i64,
    failed_loads: u64,
    /// What failed loads printed, and how often.
    failures: BTreeMap<String, u64>,
    kills: u64,
    file_loads: u64,
    file_admitted: i64,
    file_loads_failed: u64,
    over_admitted: i64,
    daemon_mib: Series,
    log_mib: Series,
}

impl Figures {
    fn words(&self) -> String {
        format!(
            "{} loads on the table, {} admitted, {} without a report: {:#?}; {} daemons killed; {} loads on the file, \
             {} admitted, {} without a report; {} over-admitted",
            self.loads,
            self.admitted,
            self.failed_loads,
            self.failures,
            self.kills,
            self.file_loads,
            self.file_admitted,
            self.file_loads_failed,
            self.over_admitted
        )
    }
}

type Shared = Arc<Mutex<Figures>>;

/// Short loads on one entity after the other. Those that meet the hung endpoint may fail.
fn load(plan: Plan, program: &Program, figures: &Shared) {
    for entity in ENTITIES.iter().cycle() {
        if plan.is_over() {
            return;
        }
        let child = program.start(&[
            "bench",
            "--entity",
            entity,
            "--resource",
            "gpt-4",
            "--concurrency",
            "8",
            "--each",
            "40",
            "-l",
            "rpm:100000",
            "-l",
            "tpm:1000000",
            "-c",
            "rpm:1",
            "-c",
            "tpm:7",
            "-o",
            "json",
        ]);
        let output = child.wait_with_output().unwrap();
        let report: Option<Json> = serde_json::from_slice(&output.stdout).ok();
        let figures = &mut *figures.lock().unwrap();
        figures.loads += 1;
        match report {
            Some(report) => {
                figures.admitted += report["admitted"].as_i64().unwrap();
                figures.over_admitted += report["over_admitted"].as_i64().unwrap();
            }
            None => {
                figures.failed_loads += 1;
                let printed = String::from_utf8_lossy(&output.stderr).into_owned();
                *figures.failures.entry(printed).or_default() += 1;
            }
        }
        sleep(5 * second());
    }
}

/// A daemon that is killed again and again, beside one that is not.
fn kill(plan: Plan, program: &Program, figures: &Shared) {
    for wait in (3..20).cycle() {
        let mut daemon = program.daemon("127.0.0.1:0");
        sleep(wait * second());
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        figures.lock().unwrap().kills += 1;
        if plan.is_over() {
            return;
        }
    }
}

/// Loads on the file. One of them goes on while the disk is full.
fn load_file(plan: Plan, program: &Program, figures: &Shared) {
    let long = format!("{}s", (plan.fault * 2).as_secs());
    while !plan.is_over() {
        let is_near = {
            let (now, full) = (plan.began.elapsed(), plan.whole.mul_f64(0.6));
            now < full && now + plan.fault / 2 > full
        };
        let duration = if is_near { long.as_str() } else { "8s" };
        let child = program.start(&[
            "bench",
            "--entities",
            "300",
            "--concurrency",
            "4",
            "--duration",
            duration,
            "-l",
            "rpm:600",
            "-l",
            "tpm:60000",
            "-o",
            "json",
        ]);
        let output = child.wait_with_output().unwrap();
        let report: Option<Json> = serde_json::from_slice(&output.stdout).ok();
        {
            let figures = &mut *figures.lock().unwrap();
            figures.file_loads += 1;
            match report {
                Some(report) => {
                    figures.file_admitted += report["admitted"].as_i64().unwrap();
                    figures.over_admitted += report["over_admitted"].as_i64().unwrap();
                }
                None => figures.file_loads_failed += 1,
            }
        }
        sleep(15 * second());
    }
}

/// A file system of its own.
struct Disk(tempfile::TempDir);

impl Disk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", DISK, "tmpfs"])
            .arg(folder.path())
            .status();
        assert!(mount.unwrap().success(), "the soak needs root");
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Leaves no space.
    fn fill(&self) {
        let mut file = fs::File::create(self.path().join("filler")).unwrap();
        while std::io::Write::write(&mut file, &[0; 65_536]).is_ok_and(|written| written > 0) {}
    }

    fn free(&self) {
        fs::remove_file(self.path().join("filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// What the buckets have counted, in tokens: for each entity, `rpm` and `tpm`.
async fn counted() -> BTreeMap<String, (i64, i64)> {
    let place = DynamoAddress {
        table: TABLE.to_owned(),
        region: Some("us-east-1".to_owned()),
        endpoint: Some(endpoint::address().to_owned()),
    };
    let (client, mut counts, mut after) = (place.client().await, BTreeMap::new(), None);
    loop {
        let scan = client.scan().table_name(TABLE).set_exclusive_start_key(after);
        let page = scan.send().await.unwrap();
        for item in page.items() {
            let count = |name: &str| {
                let number = item.get(name).and_then(|value| value.as_n().ok());
                number.map_or(0, |number| number.parse::<i64>().unwrap() / 1_000)
            };
            let key = item["PK"].as_s().unwrap();
            if let Some((_, bucket)) = key.split_once("/BUCKET#") {
                let entity = bucket.split('#').next().unwrap().to_owned();
                let (rpm, tpm) = counts.entry(entity).or_insert((0, 0));
                (*rpm, *tpm) = (*rpm + count("b_rpm_tc"), *tpm + count("b_tpm_tc"));
            }
        }
        after = page.last_evaluated_key().cloned();
        if after.is_none() {
            return counts;
        }
    }
}

#[tokio::test]
#[ignore = "half an hour in real time, as root; run it by name with --ignored --nocapture"]
async fn usage_equals_the_buckets_after_kills_a_hung_endpoint_and_a_full_disk() {
    endpoint::table(TABLE).await;
    let (proxy, disk) = (Proxy::to(endpoint::address()), Disk::new());
    let home = tempfile::tempdir().unwrap();
    let on = |store: String| Program { store, home: home.path().to_owned() };
    let at = |url: &str| on(format!("dynamodb:{TABLE}?region=us-east-1&endpoint={url}"));
    let table = at(&proxy.url);
    let file = disk.path().join("limits.db");
    let on_file = on(format!("sqlite:{}", file.display()));
    let (plan, figures) = (Plan::new(), Shared::default());
    let mut lasting = table.daemon("127.0.0.1:0");
    let workers: Vec<_> = [(load as fn(_, &_, &_), &table), (kill, &table), (load_file, &on_file)]
        .into_iter()
        .map(|(work, program)| {
            let (program, figures) = (program.clone(), Arc::clone(&figures));
            spawn(move || work(plan, &program, &figures))
        })
        .collect();
    let mut stage = 0;
    while !plan.is_over() || !workers.iter().all(|worker| worker.is_finished()) {
        sleep(second());
        let (now, at) = (plan.began.elapsed(), |part: f64| plan.whole.mul_f64(part));
        let due = [at(0.3), at(0.3) + plan.fault, at(0.6), at(0.6) + plan.fault];
        while stage < due.len() && now >= due[stage] {
            match stage {
                0 => proxy.set(Mode::Hang),
                1 => proxy.set(Mode::Pass),
                2 => disk.fill(),
                _ => disk.free(),
            }
            stage += 1;
        }
        let log = fs::metadata(file.with_extension("db-wal")).map_or(0, |log| log.len());
        let figures = &mut *figures.lock().unwrap();
        figures.log_mib.0.push(log as f64 / 1_048_576.0);
        figures.daemon_mib.0.push(memory(&lasting).expect("the daemon runs"));
    }
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    lasting.kill().unwrap();
    lasting.wait().unwrap();
    let direct = at(endpoint::address());
    direct.json(&["aggregate", "--once", "--takeover-after", "5s"]);
    let counted = counted().await;
    let figures = figures.lock().unwrap();
    println!("{:.1} minutes: {}", plan.began.elapsed().as_secs_f64() / 60.0, figures.words());
    println!("memory of the daemon, MiB: {}", figures.daemon_mib.words());
    println!("log of the file, MiB: {}", figures.log_mib.words());
    let mut rpm_of_all = 0;
    for entity in ENTITIES {
        let (rpm, tpm) = counted[entity];
        rpm_of_all += rpm;
        for window in ["daily", "monthly"] {
            let summary = direct.json(&["usage", "summary", "-e", entity, "-w", window]);
            println!("{entity}, {window}: counted {rpm} and {tpm}, usage {}", summary["consumed"]);
            assert_eq!(summary["consumed"]["rpm"].as_i64(), Some(rpm), "{entity}, {window}");
            assert_eq!(summary["consumed"]["tpm"].as_i64(), Some(tpm), "{entity}, {window}");
        }
    }
    // A call without an answer may have been counted.
    assert!(rpm_of_all >= figures.admitted && figures.admitted > 0);
    assert!(figures.file_admitted > 0 && figures.kills > 0);
    assert_eq!(figures.over_admitted, 0);
    let (memory, log) = (&figures.daemon_mib, &figures.log_mib);
    assert!(memory.of_quarter(3) <= memory.of_quarter(0) * 1.5 + 4.0, "{memory:?}");
    assert!((0..4).all(|quarter| log.of_quarter(quarter) < LOG_MIB_MAX), "{log:?}");
}
