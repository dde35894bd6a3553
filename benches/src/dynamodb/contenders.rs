//! The contenders: bare calls of the SDK, the limiter, the Python client.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region, SharedHttpClient};
use aws_sdk_dynamodb::types::{AttributeValue, ReturnValue};
use tokio::runtime::Runtime;
use zae_limiter_core::{BucketKey, Clock, EntityId, RateLimiter, ResourceName, SystemClock};
use zae_limiter_dynamodb::aws::{AwsTable, CreateTable};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

use super::Tally;
use crate::measure::Walk;
use crate::memory::{acquire_and_commit, limits};

pub const TABLE: &str = "bench";

/// A client that makes calls on one of many buckets.
pub trait Contender: Send + Sync + 'static {
    fn call(&self, bucket: usize) -> impl Future<Output = ()> + Send;

    /// Write units so far; 0 if it does not count them.
    fn write_units(&self) -> f64 {
        0.0
    }
}

/// Runs concurrent callers, each with one call after the other, and returns the number of calls.
pub fn call_for<C: Contender>(
    runtime: &Runtime,
    time: Duration,
    contender: &Arc<C>,
    buckets: usize,
    callers: usize,
) -> u64 {
    let calls = Arc::new(AtomicU64::new(0));
    let end = Instant::now() + time;
    let caller = |number: usize| {
        let (contender, calls) = (Arc::clone(contender), Arc::clone(&calls));
        runtime.spawn(async move {
            let mut walk = Walk::new(number, buckets);
            while Instant::now() < end {
                contender.call(walk.next_place()).await;
                calls.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    let tasks: Vec<_> = (0..callers).map(caller).collect();
    runtime.block_on(async {
        for task in tasks {
            task.await.expect("no call fails");
        }
    });
    calls.load(Ordering::Relaxed)
}

fn client(endpoint: &str) -> Client {
    client_with(endpoint, aws_smithy_http_client::Builder::new().build_http())
}

pub fn client_with(endpoint: &str, http: SharedHttpClient) -> Client {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .credentials_provider(Credentials::new("local", "local", None, None, "bench"))
        .endpoint_url(endpoint)
        .retry_config(RetryConfig::disabled())
        .http_client(http)
        .build();
    Client::from_conf(config)
}

/// Creates the table that all of them use.
pub async fn create_table(endpoint: &str) {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    CreateTable::new(TABLE).create(&client(endpoint), &clock).await.expect("a new table");
}

/// The limiter: acquire and commit.
pub struct Ours {
    limiter: RateLimiter,
    keys: Vec<String>,
}

impl Ours {
    /// Creates a bucket for every key.
    pub async fn open(endpoint: &str, keys: Vec<String>, options: DynamoOptions) -> Arc<Self> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let table = Arc::new(AwsTable::new(client(endpoint), TABLE, clock));
        let store = DynamoStore::new(table, options);
        let builder = RateLimiter::builder(store).deadline(Duration::from_secs(60));
        let limiter = builder.open().await.expect("a limiter");
        limiter.set_resource_defaults("gpt-4", limits()).await.expect("limits");
        for key in &keys {
            acquire_and_commit(&limiter, key).await;
        }
        Arc::new(Self { limiter, keys })
    }
}

impl Contender for Ours {
    async fn call(&self, bucket: usize) {
        acquire_and_commit(&self.limiter, &self.keys[bucket]).await;
    }

    fn write_units(&self) -> f64 {
        self.limiter.store().cost().map_or(0.0, |cost| cost.write_units)
    }
}

/// Several simulated processes on one bucket with several shards. The bucket number picks the process.
pub struct Fleet {
    limiters: Vec<RateLimiter>,
    key: String,
}

impl Fleet {
    pub const PROCESSES: usize = 8;

    pub async fn open(endpoint: &str, shards: u32) -> Arc<Self> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let key = format!("fleet-{shards}");
        let mut limiters = Vec::new();
        let store = || {
            let table = Arc::new(AwsTable::new(client(endpoint), TABLE, Arc::clone(&clock)));
            DynamoStore::new(table, DynamoOptions::default().shards_max(shards))
        };
        for _ in 0..Self::PROCESSES {
            let builder = RateLimiter::builder(store()).deadline(Duration::from_secs(60));
            let limiter = builder.open().await.expect("a limiter");
            acquire_and_commit(&limiter, &key).await;
            if limiters.is_empty() {
                let bucket = BucketKey {
                    namespace: limiter.namespace_id().clone(),
                    entity: EntityId::new(&key).expect("a valid id"),
                    resource: ResourceName::new("gpt-4").expect("a valid name"),
                };
                let split = store().split_to(&bucket, shards, clock.now()).await;
                assert_eq!(split.expect("an answer"), Some(shards));
            }
            limiters.push(limiter);
        }
        Arc::new(Self { limiters, key })
    }
}

impl Contender for Fleet {
    async fn call(&self, process: usize) {
        acquire_and_commit(&self.limiters[process], &self.key).await;
    }

    fn write_units(&self) -> f64 {
        let cost =
            |limiter: &RateLimiter| limiter.store().cost().map_or(0.0, |cost| cost.write_units);
        self.limiters.iter().map(cost).sum()
    }
}

/// The baseline: one conditional `UpdateItem` on an item like a bucket's. A limiter with one write per
/// acquire cannot be faster.
pub struct Bare {
    client: Client,
    returns: ReturnValue,
    keys: Vec<HashMap<String, AttributeValue>>,
    values: HashMap<String, AttributeValue>,
}

impl Bare {
    /// Creates copies of a bucket of the limiter.
    pub async fn beside(endpoint: &str, count: usize) -> Arc<Self> {
        let client = client(endpoint);
        let scan = client.scan().table_name(TABLE).filter_expression("attribute_exists(b_rpm_tk)");
        let found = scan.send().await.expect("an answer").items.unwrap_or_default();
        let bucket = found.into_iter().next().expect("a bucket of ours");
        let bare = Self::on(client, count);
        for key in &bare.keys {
            let mut item = bucket.clone();
            item.extend(key.clone());
            let put = bare.client.put_item().table_name(TABLE).set_item(Some(item));
            put.send().await.expect("an item");
        }
        bare
    }

    /// Calls on items that exist.
    pub fn on(client: Client, count: usize) -> Arc<Self> {
        let text = |text: &str| AttributeValue::S(text.to_owned());
        let key = |number: usize| {
            let pk = text(&format!("bare/BUCKET#key-{number:07}#gpt-4#0"));
            HashMap::from([("PK".to_owned(), pk), ("SK".to_owned(), text("#STATE"))])
        };
        let value =
            |name: &str, number: i64| (name.to_owned(), AttributeValue::N(number.to_string()));
        let values = HashMap::from([
            value(":r", 1_000),
            value(":t", 10_000),
            value(":nr", -1_000),
            value(":nt", -10_000),
        ]);
        let keys = (0..count).map(key).collect();
        Arc::new(Self { client, returns: ReturnValue::None, keys, values })
    }

    pub fn returning_nothing(self: &Arc<Self>) -> Arc<Self> {
        Arc::clone(self)
    }

    /// Returns the new item with each call, as the limiter needs it.
    pub fn returning_the_item(&self) -> Arc<Self> {
        Arc::new(Self {
            client: self.client.clone(),
            returns: ReturnValue::AllNew,
            keys: self.keys.clone(),
            values: self.values.clone(),
        })
    }
}

impl Contender for Bare {
    async fn call(&self, bucket: usize) {
        let update = self
            .client
            .update_item()
            .table_name(TABLE)
            .set_key(Some(self.keys[bucket].clone()))
            .update_expression(
                "ADD b_rpm_tk :nr, b_rpm_tc :r, b_tpm_tk :nt, b_tpm_tc :t, b_wcu_tk :nr",
            )
            .condition_expression("b_rpm_tk >= :r AND b_tpm_tk >= :t")
            .set_expression_attribute_values(Some(self.values.clone()))
            .return_values(self.returns.clone());
        update.send().await.expect("the condition holds");
    }
}

/// The Python client, in its own process.
pub struct Python {
    pub version: String,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Python {
    /// Starts the Python that `ZAEL_PYTHON` names, which creates its buckets; else `None`.
    pub fn start(endpoint: &str, entities: usize) -> Result<Option<Self>, String> {
        let Some(program) = std::env::var_os("ZAEL_PYTHON") else { return Ok(None) };
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/dynamodb/throughput.py");
        let child = Command::new(&program)
            .args([script, endpoint, TABLE, &entities.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child =
            child.map_err(|error| format!("could not start {}: {error}", program.display()))?;
        let input = child.stdin.take().expect("it is piped");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut python = Self { version: String::new(), child, input, output };
        python.version = python.line()?;
        Ok(Some(python))
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|error| error.to_string())?;
        match line.trim() {
            "" => Err("the Python client has ended; see its error above".to_owned()),
            line => Ok(line.to_owned()),
        }
    }

    pub(super) fn round(
        &mut self,
        buckets: usize,
        callers: usize,
        time: Duration,
    ) -> Result<Tally, String> {
        let request = format!("{buckets} {callers} {}", time.as_secs_f64());
        writeln!(self.input, "{request}").map_err(|error| error.to_string())?;
        let answer = self.line()?;
        let numbers: Vec<f64> = answer.split(' ').filter_map(|n| n.parse().ok()).collect();
        let [calls, seconds, client_cpu] = numbers[..] else {
            return Err(format!("unexpected answer of the Python client: {answer:?}"));
        };
        Ok(Tally { calls: calls as u64, seconds, client_cpu, ..Tally::default() })
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
