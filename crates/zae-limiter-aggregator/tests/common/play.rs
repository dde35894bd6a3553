//! A stream in memory, and a simulated world with daemons on it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use zae_limiter_aggregator::daemon::{
    Begin, Daemon, End, Notice, Page, Stream, StreamError, StreamErrorKind, StreamShard, Until,
};
use zae_limiter_aggregator::{Aggregator, Archive, Report, Settings, read_event};
use zae_limiter_core::{BoxFuture, Clock};
use zae_limiter_schema::{Item, ItemKey, Table, Value};
use zae_limiter_testkit::{Changed, ClientClock, Faults, SimTable, World};

/// A stream shard of the fake stream.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    pub(crate) parent: Option<String>,
    pub(crate) records: Vec<serde_json::Value>,
    /// How many of the records are trimmed.
    pub(crate) trimmed: usize,
    pub(crate) closed: bool,
    /// So many empty pages come before the next record.
    pub(crate) empty_pages: usize,
    /// So many empty pages come after each new iterator.
    pub(crate) gap: usize,
    /// Reading a page of it panics.
    pub(crate) panics: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Inside {
    pub(crate) shards: BTreeMap<String, Stored>,
    /// Iterators with a lower number have expired.
    pub(crate) oldest_iterator: u64,
    pub(crate) iterators: u64,
    /// How many of the next calls fail.
    pub(crate) fails: u32,
    /// How many pages were requested.
    pub(crate) pages: u64,
    /// The requests for a page that fail, by their number.
    pub(crate) fails_at: Vec<u64>,
    /// Calls are not answered.
    pub(crate) hangs: bool,
    /// The order in which stream shards were read.
    pub(crate) read: Vec<String>,
    /// Records in a page.
    pub(crate) page: usize,
    /// The stream that was enabled after this one was disabled.
    pub(crate) next: Option<Arc<FakeStream>>,
    /// Names the last record of open stream shards, too, as an emulator does.
    pub(crate) names_the_last_record: bool,
    arn: String,
    /// The number of the last record.
    numbers: u64,
    /// The table whose own records, checkpoints and usage, come into the stream, too.
    table: Option<SimTable>,
}

impl Inside {
    pub(crate) fn next_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Adds a record to a stream shard.
    fn push(&mut self, shard: &str, mut record: serde_json::Value) {
        record["eventSourceARN"] = self.arn.clone().into();
        self.shards.get_mut(shard).unwrap().records.push(record);
    }

    /// Adds what daemons and functions have written to the first open stream shard.
    pub(crate) fn add_own_writes(&mut self) {
        for changed in self.table.as_ref().map(SimTable::take_changes).unwrap_or_default() {
            let number = self.next_number();
            let at = super::NOW.saturating_add_millis(changed.at_us / 1_000);
            let record = super::record(&changed, number, at);
            let open = self.shards.iter().find(|(_, shard)| !shard.closed);
            if let Some(name) = open.map(|(name, _)| name.clone()) {
                self.push(&name, record);
            }
        }
    }
}

/// A stream in memory. An iterator is its number, the stream shard, the index of a record, and how many
/// empty pages come before it.
#[derive(Debug)]
pub(crate) struct FakeStream(pub(crate) Mutex<Inside>, String);

pub(crate) const LABEL: &str = "2026-11-01T00:00:00.000";
pub(crate) const PAGE: usize = 4;

impl Default for FakeStream {
    fn default() -> Self {
        Self::labelled(LABEL)
    }
}

impl FakeStream {
    pub(crate) fn labelled(label: &str) -> Self {
        let arn = format!("arn:aws:dynamodb:us-east-1:123456789012:table/limiter/stream/{label}");
        Self(Mutex::new(Inside { page: PAGE, arn, ..Inside::default() }), label.to_owned())
    }

    pub(crate) fn inside(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.0.lock().unwrap()
    }

    pub(crate) fn split(&self, parent: Option<&str>, child: &str) {
        let inside = &mut *self.0.lock().unwrap();
        if let Some(parent) = parent {
            inside.shards.get_mut(parent).unwrap().closed = true;
        }
        let stored = Stored { parent: parent.map(str::to_owned), ..Stored::default() };
        inside.shards.insert(child.to_owned(), stored);
    }

    pub(crate) fn push(&self, shard: &str, record: serde_json::Value) {
        self.inside().push(shard, record);
    }

    /// From now on, the stream has all changes of this table.
    pub(crate) fn follow(&self, table: &SimTable) {
        table.take_changes();
        self.inside().table = Some(table.clone());
    }
}

type Reply<T> = BoxFuture<'static, Result<T, StreamError>>;

fn reply<T: Send + 'static>(hangs: bool, reply: Result<T, StreamErrorKind>) -> Reply<T> {
    let reply = reply.map_err(|kind| StreamError { kind, message: format!("{kind:?}") });
    match hangs {
        true => Box::pin(std::future::pending()),
        false => Box::pin(async { reply }),
    }
}

impl Stream for FakeStream {
    fn label(&self) -> &str {
        &self.1
    }

    fn shards(&self) -> BoxFuture<'_, Result<Vec<StreamShard>, StreamError>> {
        let inside = self.inside();
        let number = |record: &serde_json::Value| record["dynamodb"]["SequenceNumber"].clone();
        let end = |stored: &Stored| {
            let last = stored.records.iter().skip(stored.trimmed).next_back().map(number);
            let last = last.and_then(|number| number.as_str().map(str::to_owned));
            match (last, stored.closed) {
                (Some(last), true) => End::After(last),
                (None, true) => End::After("1".to_owned()),
                (Some(last), false) if inside.names_the_last_record => End::After(last),
                (_, false) => End::Open,
            }
        };
        let shard = |(id, stored): (&String, &Stored)| StreamShard {
            id: id.clone(),
            parent: stored.parent.clone(),
            end: end(stored),
        };
        let shards = inside.shards.iter().map(shard).collect();
        reply(inside.hangs, Ok(shards))
    }

    fn iterator<'a>(
        &'a self,
        shard: &'a str,
        begin: &'a Begin,
    ) -> BoxFuture<'a, Result<String, StreamError>> {
        let inside = &mut *self.inside();
        inside.iterators += 1;
        let Some(stored) = inside.shards.get(shard) else {
            return reply(inside.hangs, Err(StreamErrorKind::NotFound));
        };
        let at = match begin {
            Begin::Oldest => stored.trimmed,
            Begin::After(number) => {
                let is_it = |record: &serde_json::Value| {
                    record["dynamodb"]["SequenceNumber"].as_str() == Some(number)
                };
                stored.records.iter().position(is_it).unwrap() + 1
            }
        };
        let iterator = match at < stored.trimmed {
            true => Err(StreamErrorKind::Trimmed),
            false => Ok(format!("{} {shard} {at} {}", inside.iterators, stored.gap)),
        };
        reply(inside.hangs, iterator)
    }

    fn page<'a>(&'a self, iterator: &'a str) -> BoxFuture<'a, Result<Page, StreamError>> {
        let inside = &mut *self.inside();
        inside.add_own_writes();
        let words: Vec<&str> = iterator.split(' ').collect();
        let (number, shard, at) =
            (words[0].parse::<u64>().unwrap(), words[1], words[2].parse::<usize>().unwrap());
        inside.pages += 1;
        if inside.fails > 0 || inside.fails_at.contains(&inside.pages) {
            inside.fails = inside.fails.saturating_sub(1);
            return reply(inside.hangs, Err(StreamErrorKind::Transient));
        }
        if number < inside.oldest_iterator {
            return reply(inside.hangs, Err(StreamErrorKind::Expired));
        }
        let Some(stored) = inside.shards.get_mut(shard) else {
            return reply(inside.hangs, Err(StreamErrorKind::NotFound));
        };
        if stored.panics {
            return Box::pin(async { panic!("a fault of the daemon") });
        }
        if at < stored.trimmed {
            return reply(inside.hangs, Err(StreamErrorKind::Trimmed));
        }
        if stored.empty_pages > 0 {
            stored.empty_pages -= 1;
            return reply(
                inside.hangs,
                Ok(Page { records: Vec::new(), next: Some(iterator.to_owned()) }),
            );
        }
        let gap = words[3].parse::<usize>().unwrap();
        if gap > 0 {
            let next = Some(format!("{number} {shard} {at} {}", gap - 1));
            return reply(inside.hangs, Ok(Page { records: Vec::new(), next }));
        }
        let records: Vec<_> =
            stored.records.iter().skip(at).take(inside.page).map(super::read).collect();
        let end = at + records.len();
        let is_over = stored.closed && end == stored.records.len();
        if !records.is_empty() {
            inside.read.push(shard.to_owned());
        }
        let next = (!is_over).then(|| format!("{number} {shard} {end} 0"));
        reply(inside.hangs, Ok(Page { records, next }))
    }

    fn successor(&self) -> BoxFuture<'_, Result<Option<Arc<dyn Stream>>, StreamError>> {
        let inside = self.inside();
        let next = inside.next.clone().map(|next| next as Arc<dyn Stream>);
        reply(inside.hangs, Ok(next))
    }
}

/// A simulated world with a stream. Each record of the stream takes one token.
pub(crate) struct Play {
    pub(crate) world: Arc<World>,
    pub(crate) stream: Arc<FakeStream>,
    pub(crate) clients: u32,
    /// How far the clocks of the next daemons are off.
    pub(crate) clock_offset_us: i64,
    pub(crate) notices: Arc<Mutex<Vec<(u32, Notice)>>>,
    /// The archive of the next daemons.
    pub(crate) archive: Option<Arc<dyn Archive>>,
}

impl Play {
    pub(crate) fn new(world: Arc<World>) -> Self {
        world.table.set_faults(Faults::delay(500));
        Self::beside(world, 0)
    }

    /// A play in a world with other clients, whose numbers are `clients` at most.
    pub(crate) fn beside(world: Arc<World>, clients: u32) -> Self {
        let (stream, notices) = (Arc::default(), Arc::default());
        Self { world, stream, clients, clock_offset_us: 0, notices, archive: None }
    }

    /// Adds changes of an entity's bucket to the stream. Each takes a token.
    pub(crate) fn change(&mut self, shard: &str, entity: &str, times: u64) {
        for _ in 0..times {
            let number = {
                let mut inside = self.stream.inside();
                // Records are in the order of their times.
                inside.add_own_writes();
                inside.next_number()
            };
            let key = ItemKey::new(format!("abcdefghijk/BUCKET#{entity}#gpt-4#0"), "#STATE");
            let item = |count: u64| {
                Item::from([("b_rpm_tc".to_owned(), Value::N((count * 1_000).to_string()))])
            };
            let (old, new) = (Some(item(number - 1)), Some(item(number)));
            let changed = Changed { at_us: 0, key, old, new, by_table: false };
            let at = self.world.time.now();
            self.stream.push(shard, super::record(&changed, number, at));
        }
    }

    pub(crate) fn daemon(&mut self) -> Daemon {
        self.daemon_with(Duration::from_secs(20))
    }

    pub(crate) fn daemon_with(&mut self, takeover_after: Duration) -> Daemon {
        self.clients += 1;
        let client = self.clients;
        let table = Arc::new(self.world.table.for_client(client));
        let clock: Arc<dyn Clock> = Arc::new(ClientClock::new(
            Arc::clone(&self.world.time),
            i64::MAX / 4,
            self.clock_offset_us,
            0,
        ));
        let aggregator = Aggregator::new(
            Arc::clone(&table) as Arc<dyn Table>,
            Arc::clone(&clock),
            Settings::default(),
        );
        let aggregator = match &self.archive {
            Some(archive) => aggregator.archive(Arc::clone(archive)),
            None => aggregator,
        };
        let notices = Arc::clone(&self.notices);
        let stream = Arc::clone(&self.stream) as Arc<dyn Stream>;
        let daemon =
            Daemon::new(stream, table, clock, aggregator, takeover_after, format!("d{client}"));
        daemon.on_notice(Arc::new(move |notice| notices.lock().unwrap().push((client, notice))))
    }

    /// The Lambda function, which gets records of a stream shard in its own batches.
    pub(crate) async fn invoke(&mut self, shard: &str, records: std::ops::Range<usize>) {
        let report = self.deliver(shard, records).await;
        assert_eq!(report.failed, Vec::<String>::new());
    }

    pub(crate) async fn deliver(&mut self, shard: &str, records: std::ops::Range<usize>) -> Report {
        let records = self.stream.inside().shards[shard].records[records].to_vec();
        let event = serde_json::json!({ "Records": records }).to_string();
        self.function().process(read_event(&event).unwrap()).await
    }

    /// A new instance of the function.
    pub(crate) fn function(&mut self) -> Aggregator {
        self.clients += 1;
        let table = Arc::new(self.world.table.for_client(self.clients));
        let clock = ClientClock::new(Arc::clone(&self.world.time), 0, 0, 0);
        Aggregator::new(table, Arc::new(clock), Settings::default())
    }

    pub(crate) async fn drain(&mut self) {
        let mut daemon = self.daemon();
        daemon.run(Until::Drained, std::future::pending()).await.unwrap();
    }

    pub(crate) fn booked(&self, entity: &str) -> i64 {
        booked(&self.world.table, entity)
    }

    pub(crate) fn noticed(&self, wanted: impl Fn(u32, &Notice) -> bool) -> usize {
        let notices = self.notices.lock().unwrap();
        notices.iter().filter(|(client, notice)| wanted(*client, notice)).count()
    }
}

pub(crate) fn booked(table: &SimTable, entity: &str) -> i64 {
    let key = ItemKey::new(format!("abcdefghijk/ENTITY#{entity}"), "#USAGE#gpt-4#2026-11");
    let usage = table.item(&key).unwrap_or_default();
    usage.get("rpm").and_then(Value::as_i64).unwrap_or_default()
}

pub(crate) fn play(scenario: impl AsyncFnOnce(Play) + 'static) {
    play_seed(1, scenario);
}

pub(crate) fn play_seed<T>(seed: u64, scenario: impl AsyncFnOnce(Play) -> T + 'static) -> T {
    World::play(seed, 0, async move |world| scenario(Play::new(world)).await)
}
