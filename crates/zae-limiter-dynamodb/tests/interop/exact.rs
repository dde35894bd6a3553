//! Several processes of both clients, one bucket that does not refill: exactly what is there is
//! admitted.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde_json::json;
use zae_limiter_core::{Error, Limit, RateLimiter};

use crate::both::{Both, Kind, store};
use crate::python::Process;
use crate::server;

const ENDPOINT: &str = "ZAEL_TEST_ENDPOINT";
const TABLE: &str = "ZAEL_TEST_TABLE";
const NAMESPACE: &str = "ZAEL_TEST_NAMESPACE";
const ENTITY: &str = "ZAEL_TEST_ENTITY";
const CAPACITY: u64 = 1_000;
const TASKS: usize = 64;
/// What each task takes in the first heat: everybody's share fits, so nobody may be refused, and
/// nobody is left out however fast the others are.
const SHARE: u64 = 4;
/// How often each task of ours looks at what is left between two takes. Else a few writes, each for all
/// who wait, would be over before Python has begun.
const LOOKS: usize = 1;

/// Run by the case below as a process of its own: waits for a line, has its tasks take their share,
/// one token at a time, and says how many were admitted; waits for another, and takes until there is
/// nothing left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_takes_all_it_can() {
    let Ok(endpoint) = std::env::var(ENDPOINT) else { return };
    let variable = |name| std::env::var(name).unwrap();
    let limiter = RateLimiter::builder(store(&endpoint, &variable(TABLE)))
        .namespace(variable(NAMESPACE))
        .deadline(Duration::from_secs(60))
        .open()
        .await
        .unwrap();
    println!("\nready");
    for share in [SHARE, u64::MAX] {
        std::io::stdin().lock().read_line(&mut String::new()).unwrap();
        let tasks =
            (0..TASKS).map(|_| tokio::spawn(take(limiter.clone(), variable(ENTITY), share)));
        let mut admitted = 0;
        for task in tasks.collect::<Vec<_>>() {
            admitted += task.await.unwrap();
        }
        println!("\nadmitted {admitted}");
    }
}

/// Takes one token at a time, until it has its share or there are none: how many it got.
async fn take(limiter: RateLimiter, entity: String, share: u64) -> u64 {
    let mut admitted = 0;
    while admitted < share {
        match limiter.acquire(&entity, "gpt-4").take("rpm", 1).await {
            Ok(lease) => lease.commit().await.unwrap(),
            Err(Error::Exceeded(_)) => break,
            // So many others have written that it was given up, without having taken anything.
            Err(Error::Unavailable { .. }) => continue,
            Err(error) => panic!("{error:?}"),
        }
        admitted += 1;
        for _ in 0..LOOKS {
            limiter.available(&entity, "gpt-4", &[]).await.unwrap();
        }
    }
    admitted
}

fn start(both: &Both, entity: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "exact::child_takes_all_it_can", "--nocapture"])
        .env(ENDPOINT, server::endpoint())
        .env(TABLE, &both.table)
        .env(NAMESPACE, &both.namespace)
        .env(ENTITY, entity)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A process of ours, waiting for its turn.
struct Ours {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Ours {
    fn start(both: &Both, entity: &str) -> Self {
        let mut child = start(both, entity);
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut ours = Self { child, output };
        ours.wait_for("ready");
        ours
    }

    fn go(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    fn admitted(&mut self) -> u64 {
        self.wait_for("admitted").parse().unwrap()
    }

    /// The rest of the line that starts with a word.
    fn wait_for(&mut self, word: &str) -> String {
        let mut lines = (&mut self.output).lines().map(Result::unwrap);
        let found =
            lines.find_map(|line| line.strip_prefix(word).map(|rest| rest.trim().to_owned()));
        found.unwrap_or_else(|| panic!("the process has not said {word}"))
    }
}

/// Two processes of ours and one of Python's on one bucket.
struct Race<'a> {
    both: &'a Both,
    entity: String,
    ours: [Ours; 2],
}

impl Race<'_> {
    /// All take until they have their share, or until there is nothing left: how many each got.
    async fn heat(
        &mut self,
        python: Process,
        share: Option<u64>,
        start: Start,
    ) -> (Process, [u64; 3]) {
        let flood = json!({
            "op": "flood",
            "table": self.both.table,
            "namespace": self.both.namespace,
            "entity": self.entity,
            "resource": "gpt-4",
            "take": {"rpm": 1},
            "tasks": TASKS,
            "share": share,
        });
        let mut python = python;
        let flood = tokio::task::spawn_blocking(move || (python.call(&flood), python));
        while start == Start::PythonFirst
            && !flood.is_finished()
            && self.both.numbers(&self.entity).await.is_empty()
        {}
        self.ours.iter_mut().for_each(Ours::go);
        let (admitted, python) = flood.await.unwrap();
        let [one, other] = &mut self.ours;
        let admitted = [admitted.unwrap().as_u64().unwrap(), one.admitted(), other.admitted()];
        (python, admitted)
    }
}

/// Who makes the bucket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// Whoever is first: all at once.
    AtOnce,
    /// Python, which is slower.
    PythonFirst,
}

pub(crate) async fn three_processes_share_one_budget(both: Both) {
    let mut python = Process::start(both.release);
    // Opened before it is a race.
    let open = json!({"op": "namespace_id", "table": both.table, "namespace": both.namespace});
    python.call(&open).unwrap();
    // The index of their table is written along, but what decides is the same.
    let runs = if both.kind == Kind::Ours { 10 } else { 3 };
    for run in 0..runs {
        let entity = format!("run-{run}");
        let limit = Limit::per("rpm", 1, Duration::from_secs(1_000_000_000)).burst(CAPACITY);
        both.ours.set_limits(&entity, Some("gpt-4"), [limit]).await.unwrap();
        let ours = [0; 2].map(|_| Ours::start(&both, &entity));
        let mut race = Race { both: &both, entity: entity.clone(), ours };
        let start = if run % 2 == 0 { Start::AtOnce } else { Start::PythonFirst };
        let (first, second);
        (python, first) = race.heat(python, Some(SHARE), start).await;
        (python, second) = race.heat(python, None, Start::AtOnce).await;
        let numbers = both.numbers(&entity).await;
        let seen = format!("run {run}: python and ours {first:?}, then {second:?}, {numbers:?}");
        eprintln!("{seen}");
        assert_eq!(first, [TASKS as u64 * SHARE; 3], "nobody is refused a share: {seen}");
        assert_eq!(first.iter().chain(&second).sum::<u64>(), CAPACITY, "{seen}");
        assert_eq!((numbers["b_rpm_tk"], numbers["b_rpm_tc"]), (0, 1_000_000), "{seen}");
        for mut ours in race.ours {
            assert!(ours.child.wait().unwrap().success());
        }
    }
}
