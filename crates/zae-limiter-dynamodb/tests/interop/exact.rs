//! Several processes of both clients, one bucket that does not refill: exactly what is there is
//! admitted.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
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
const BETWEEN_TAKES: Duration = Duration::from_millis(100);

/// Run by the case below as a process of its own: waits for a line, takes one token at a time until
/// there are none, and says how often it was admitted.
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
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    let tasks = (0..TASKS).map(|_| {
        let (limiter, entity) = (limiter.clone(), variable(ENTITY));
        tokio::spawn(async move {
            let (mut admitted, mut contended) = (0, 0);
            loop {
                match limiter.acquire(&entity, "gpt-4").take("rpm", 1).await {
                    Ok(mut lease) => {
                        lease.commit().await.unwrap();
                        admitted += 1;
                        // Else a few writes, each for all who wait, would leave Python nothing.
                        server::clock().sleep(BETWEEN_TAKES).await;
                    }
                    Err(Error::Exceeded(_)) => return (admitted, contended),
                    Err(Error::Unavailable { .. }) => contended += 1,
                    Err(error) => panic!("{error:?}"),
                }
            }
        })
    });
    let (mut admitted, mut contended) = (0, 0);
    for task in tasks.collect::<Vec<_>>() {
        let (a, c) = task.await.unwrap();
        admitted += a;
        contended += c;
    }
    println!("\nadmitted {admitted} {contended}");
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

/// The rest of the line that starts with a word.
fn wait_for(output: &mut impl std::io::BufRead, word: &str) -> String {
    let mut lines = output.lines().map(Result::unwrap);
    let found = lines.find_map(|line| line.strip_prefix(word).map(|rest| rest.trim().to_owned()));
    found.unwrap_or_else(|| panic!("the process has not said {word}"))
}

pub(crate) async fn three_processes_share_one_budget(both: Both) {
    let mut python = Process::start(both.release);
    let request = |op: &str, more: &[(&str, Value)]| {
        let mut request = json!({"op": op, "table": both.table, "namespace": both.namespace});
        more.iter().for_each(|(name, value)| request[name] = value.clone());
        request
    };
    // Opened before it is a race.
    python.call(&request("namespace_id", &[])).unwrap();
    // The index of their table is written along, but what decides is the same.
    let runs = if both.kind == Kind::Ours { 10 } else { 3 };
    for run in 0..runs {
        let entity = format!("run-{run}");
        let limit = Limit::per("rpm", 1, Duration::from_secs(1_000_000_000)).burst(CAPACITY);
        both.ours.set_limits(&entity, Some("gpt-4"), [limit]).await.unwrap();
        let mut children = [0; 2].map(|_| {
            let mut child = start(&both, &entity);
            let mut output = BufReader::new(child.stdout.take().unwrap());
            wait_for(&mut output, "ready");
            (child, output)
        });
        let flood = request(
            "flood",
            &[
                ("entity", entity.as_str().into()),
                ("resource", "gpt-4".into()),
                ("take", json!({"rpm": 1})),
                ("tasks", TASKS.into()),
            ],
        );
        let flood = tokio::task::spawn_blocking(move || (python.call(&flood), python));
        // All at once, so that they race for the new bucket; or Python first, which is slower.
        let python_first = run % 2 == 1;
        while python_first && both.numbers(&entity).await.is_empty() {
            server::clock().sleep(Duration::from_millis(1)).await;
        }
        for (child, _) in &mut children {
            child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        }
        let admitted;
        (admitted, python) = flood.await.unwrap();
        let admitted = admitted.unwrap().as_i64().unwrap();
        let ours = children.map(|(mut child, mut output)| {
            let said = wait_for(&mut output, "admitted");
            assert!(child.wait().unwrap().success());
            let mut numbers = said.split(' ').map(|number| number.parse::<i64>().unwrap());
            (numbers.next().unwrap(), numbers.next().unwrap())
        });
        let numbers = both.numbers(&entity).await;
        let seen = format!("run {run}: python {admitted}, ours {ours:?}, {numbers:?}");
        eprintln!("{seen}");
        assert_eq!(admitted + ours[0].0 + ours[1].0, 1_000, "{seen}");
        let is_race = admitted > 0 && ours[0].0 > 0 && ours[1].0 > 0;
        assert!(is_race || !python_first, "somebody is left out: {seen}");
        assert_eq!((numbers["b_rpm_tk"], numbers["b_rpm_tc"]), (0, 1_000_000), "{seen}");
    }
}
