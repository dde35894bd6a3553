//! The table over the AWS SDK.
//!
//! The SDK's own retries are off for single updates, also through a client of the user's own: after a lost
//! answer, only the store knows whether a retry is safe. The SDK retries reads, deletions, and transactions,
//! which carry one token over all attempts (`retries.rs`).

mod convert;
mod create;
mod credentials;
mod date;
mod detached;
mod endpoints;
mod errors;
mod headers;
mod lazy;
mod profiles;
mod retries;
mod scan;
mod sdk;
mod update;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::SharedInterceptor;
use aws_sdk_dynamodb::error::SdkError;
use aws_sdk_dynamodb::operation::transact_write_items::TransactWriteItemsError;
use aws_sdk_dynamodb::types::{
    AttributeValue, CancellationReason, ConditionCheck, ConsumedCapacity, Delete, DeleteRequest,
    KeysAndAttributes, ReturnConsumedCapacity, ReturnValuesOnConditionCheckFailure,
    TransactWriteItem, WriteRequest,
};
use zae_limiter_core::{BoxFuture, Clock};
use zae_limiter_schema::{
    BatchRead, BucketItemKey, Change, Consistency, Consumed, Decoded, ItemKey, Query, QueryOutput,
    Range, Rendered, ResponseDates, Scanned, Step, Table, TableError, TableErrorKind, TableTime,
    Transacted, Update, Updated, render_condition, render_update,
};

pub use create::{CreateTable, ResourceIndex};
#[doc(hidden)]
pub use credentials::look;
#[doc(hidden)]
pub use detached::on_own_thread;
pub use lazy::{DynamoAddress, LazyTable};
#[doc(hidden)]
pub use profiles::BadProfile;
#[doc(hidden)]
pub use sdk::{Call, FailedCall, FailedKind, Limit, Places};

use date::DateReader;

use convert::{from_sdk, names_to_sdk, to_sdk, values_to_sdk};
use errors::{refusal, table_error};
use retries::{CallSettings, LostAnswer};

/// The most keys in one BatchGetItem.
const BATCH_GET_MAX: usize = 100;
/// The most deletions in one BatchWriteItem.
const BATCH_WRITE_MAX: usize = 25;
/// How often a batch is sent while DynamoDB leaves some of it unprocessed, and the first wait in between.
const UNPROCESSED_ATTEMPTS_MAX: u32 = 8;
const UNPROCESSED_WAIT: Duration = Duration::from_millis(20);

/// A DynamoDB table.
pub struct AwsTable {
    client: Client,
    name: String,
    clock: Arc<dyn Clock>,
    settings: CallSettings,
    /// For single updates, which are sent once: a client without retries.
    updates: Client,
    dates: Arc<ResponseDates>,
}

impl fmt::Debug for AwsTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AwsTable").field("name", &self.name).finish_non_exhaustive()
    }
}

impl AwsTable {
    /// The table of this name, through a client that is ready to use. `clock` paces the retries of
    /// unprocessed items, and measures the time since the last response.
    pub fn new(client: Client, name: impl Into<String>, clock: Arc<dyn Clock>) -> Self {
        let dates = Arc::new(ResponseDates::default());
        let reader = DateReader::new(Arc::clone(&dates), Arc::clone(&clock));
        let settings = CallSettings::for_client(&client);
        // A copy, which shares its connections. The program's own client keeps its interceptors.
        let mut config = client.config().to_builder();
        // Permanent: otherwise every call would look some twenty times whether it is switched off.
        config.push_interceptor(SharedInterceptor::permanent(reader));
        let client = Client::from_conf(config.build());
        let updates = settings.single_attempt(&client);
        Self { client, name: name.into(), clock, settings, updates, dates }
    }

    /// The name of the table.
    pub fn name(&self) -> &str {
        &self.name
    }

    async fn transact_once(&self, changes: &[Change]) -> Result<Transacted, TableError> {
        let items: Result<Vec<TransactWriteItem>, TableError> =
            changes.iter().map(|change| self.transact_item(change)).collect();
        let lost = LostAnswer::default();
        let sent = self
            .client
            .transact_write_items()
            .set_transact_items(Some(items?))
            .return_consumed_capacity(ReturnConsumedCapacity::Total)
            .customize()
            .config_override(self.settings.with_retries())
            .interceptor(lost.clone())
            .send()
            .await;
        match sent {
            Ok(output) => {
                let mut consumed = Consumed::default();
                for each in output.consumed_capacity.unwrap_or_default() {
                    consumed += written(Some(&each));
                }
                Ok(Transacted::Done(consumed))
            }
            Err(error) => {
                let cancelled = cancelled(&error)
                    .and_then(|reasons| self.why_cancelled(changes.len(), reasons));
                match cancelled {
                    Some(Ok(unmet)) if !lost.happened() => Ok(unmet),
                    Some(Ok(_)) => Err(errors::unmet_after_lost_answer(&self.name)),
                    Some(Err(error)) => Err(lost.apply_to(error)),
                    None => Err(lost.apply_to(table_error(&self.name, error))),
                }
            }
        }
    }

    fn transact_item(&self, change: &Change) -> Result<TransactWriteItem, TableError> {
        let wrong = |error: aws_sdk_dynamodb::error::BuildError| {
            TableError::new(TableErrorKind::Rejected, format!("cannot build a request: {error}"))
        };
        let rendered = match change {
            Change::Update(update) => render_update(&update.actions, &update.conditions),
            Change::Delete(_, conditions) | Change::Check(_, conditions) => {
                render_condition(conditions)
            }
        };
        let Rendered { update, condition, names, values } = rendered;
        let key = Some(key_to_sdk(change.key()));
        let old = ReturnValuesOnConditionCheckFailure::AllOld;
        let (names, values) = (names_to_sdk(names), values_to_sdk(values));
        let item = TransactWriteItem::builder();
        let item = match change {
            Change::Update(_) => item.update(
                aws_sdk_dynamodb::types::Update::builder()
                    .table_name(&self.name)
                    .set_key(key)
                    .update_expression(update)
                    .set_condition_expression(not_empty(condition))
                    .set_expression_attribute_names(names)
                    .set_expression_attribute_values(values)
                    .return_values_on_condition_check_failure(old)
                    .build()
                    .map_err(wrong)?,
            ),
            Change::Delete(..) => item.delete(
                Delete::builder()
                    .table_name(&self.name)
                    .set_key(key)
                    .set_condition_expression(not_empty(condition))
                    .set_expression_attribute_names(names)
                    .set_expression_attribute_values(values)
                    .return_values_on_condition_check_failure(old)
                    .build()
                    .map_err(wrong)?,
            ),
            Change::Check(..) => item.condition_check(
                ConditionCheck::builder()
                    .table_name(&self.name)
                    .set_key(key)
                    .condition_expression(condition)
                    .set_expression_attribute_names(names)
                    .set_expression_attribute_values(values)
                    .return_values_on_condition_check_failure(old)
                    .build()
                    .map_err(wrong)?,
            ),
        };
        Ok(item.build())
    }

    /// Why a transaction was cancelled: by conditions, which is a result, or by a conflict or throttling,
    /// which is an error. `None` if the cancellation has no reasons.
    fn why_cancelled(
        &self,
        count: usize,
        reasons: &[CancellationReason],
    ) -> Option<Result<Transacted, TableError>> {
        if let Some(error) = errors::of_cancellation(&self.name, reasons) {
            return Some(Err(error));
        }
        let is_unmet =
            |reason: &CancellationReason| reason.code() == Some("ConditionalCheckFailed");
        if !reasons.iter().any(is_unmet) {
            return None;
        }
        let size: usize = count.max(1);
        let unmet = reasons
            .iter()
            .map(|reason| is_unmet(reason).then(|| reason.item.clone().map(from_sdk)));
        Some(Ok(Transacted::Unmet(unmet.collect(), failed_write(size * 2 * 1_024))))
    }

    async fn read_all(
        &self,
        keys: &[ItemKey],
        consistency: Consistency,
    ) -> Result<BatchRead, TableError> {
        let mut read = BatchRead::default();
        for keys in keys.chunks(BATCH_GET_MAX) {
            let keys = keys.iter().map(key_to_sdk).collect();
            let mut request = Some(self.keys_and_attributes(keys, consistency)?);
            let mut attempts = Attempts::new(self);
            while let Some(keys) = request.take() {
                let sent = self
                    .client
                    .batch_get_item()
                    .request_items(&self.name, keys)
                    .return_consumed_capacity(ReturnConsumedCapacity::Total)
                    .customize()
                    .config_override(self.settings.with_retries())
                    .send()
                    .await
                    .map_err(|error| table_error(&self.name, error))?;
                for capacity in sent.consumed_capacity.unwrap_or_default() {
                    read.consumed.read += capacity.capacity_units.unwrap_or_default();
                }
                let found = sent.responses.unwrap_or_default().remove(&self.name);
                read.items.extend(found.unwrap_or_default().into_iter().map(from_sdk));
                request = sent.unprocessed_keys.unwrap_or_default().remove(&self.name);
                if request.is_some() {
                    attempts.next().await?;
                }
            }
        }
        Ok(read)
    }

    fn keys_and_attributes(
        &self,
        keys: Vec<HashMap<String, AttributeValue>>,
        consistency: Consistency,
    ) -> Result<KeysAndAttributes, TableError> {
        KeysAndAttributes::builder()
            .set_keys(Some(keys))
            .consistent_read(consistency == Consistency::Strong)
            .build()
            .map_err(|error| {
                TableError::new(
                    TableErrorKind::Rejected,
                    format!("cannot build a request: {error}"),
                )
            })
    }

    async fn query_once(&self, query: &Query) -> Result<QueryOutput, TableError> {
        let (pk, sk) = query.index.map_or(("PK", "SK"), |index| (index.pk(), index.sk()));
        let text = |text: &str| AttributeValue::S(text.to_owned());
        let mut request = self
            .client
            .query()
            .table_name(&self.name)
            .set_index_name(query.index.map(|index| index.name().to_owned()))
            .expression_attribute_names("#pk", pk)
            .expression_attribute_values(":pk", text(&query.partition))
            .scan_index_forward(query.step == Step::Forward)
            .limit(i32::try_from(query.limit).unwrap_or(i32::MAX))
            .set_exclusive_start_key(query.after.clone().map(to_sdk))
            .return_consumed_capacity(ReturnConsumedCapacity::Total);
        if query.index.is_none() {
            request = request.consistent_read(query.consistency == Consistency::Strong);
        }
        let condition = match &query.range {
            Range::All => "#pk = :pk",
            Range::StartsWith(start) => {
                request = request
                    .expression_attribute_names("#sk", sk)
                    .expression_attribute_values(":from", text(start));
                "#pk = :pk AND begins_with(#sk, :from)"
            }
            Range::Between(from, to) => {
                request = request
                    .expression_attribute_names("#sk", sk)
                    .expression_attribute_values(":from", text(from))
                    .expression_attribute_values(":to", text(to));
                "#pk = :pk AND #sk BETWEEN :from AND :to"
            }
        };
        let output = request
            .key_condition_expression(condition)
            .customize()
            .config_override(self.settings.with_retries())
            .send()
            .await
            .map_err(|error| table_error(&self.name, error))?;
        let capacity = output.consumed_capacity.as_ref();
        let read = capacity.and_then(|capacity| capacity.capacity_units).unwrap_or_default();
        Ok(QueryOutput {
            items: output.items.unwrap_or_default().into_iter().map(from_sdk).collect(),
            next: output.last_evaluated_key.filter(|key| !key.is_empty()).map(from_sdk),
            consumed: Consumed { write: 0.0, read },
        })
    }

    async fn delete_all(&self, keys: &[ItemKey]) -> Result<Consumed, TableError> {
        let mut consumed = Consumed::default();
        let (lost, mut is_begun) = (LostAnswer::default(), false);
        for keys in keys.chunks(BATCH_WRITE_MAX) {
            let requests: Result<Vec<WriteRequest>, TableError> =
                keys.iter().map(delete_request).collect();
            let mut requests = Some(requests?);
            let mut attempts = Attempts::new(self);
            while let Some(left) = requests.take() {
                let sent = self
                    .client
                    .batch_write_item()
                    .request_items(&self.name, left)
                    .return_consumed_capacity(ReturnConsumedCapacity::Total)
                    .customize()
                    .config_override(self.settings.with_retries())
                    .interceptor(lost.clone())
                    .send()
                    .await
                    .map_err(|error| {
                        let error = table_error(&self.name, error);
                        if is_begun || lost.happened() { error.maybe_applied() } else { error }
                    })?;
                is_begun = true;
                for capacity in sent.consumed_capacity.unwrap_or_default() {
                    consumed += written(Some(&capacity));
                }
                requests = sent.unprocessed_items.unwrap_or_default().remove(&self.name);
                if requests.is_some() {
                    attempts.next().await?;
                }
            }
        }
        Ok(consumed)
    }
}

/// Waits, twice as long each time, before unprocessed items are sent again.
struct Attempts<'a> {
    table: &'a AwsTable,
    made: u32,
    wait: Duration,
}

impl<'a> Attempts<'a> {
    fn new(table: &'a AwsTable) -> Self {
        Self { table, made: 1, wait: UNPROCESSED_WAIT }
    }

    async fn next(&mut self) -> Result<(), TableError> {
        if self.made == UNPROCESSED_ATTEMPTS_MAX {
            let message =
                format!("table {} leaves requests unprocessed; try again later", self.table.name);
            return Err(TableError::new(TableErrorKind::Throttled, message).maybe_applied());
        }
        self.made += 1;
        self.table.clock.sleep(self.wait).await;
        self.wait *= 2;
        Ok(())
    }
}

fn key_to_sdk(key: &ItemKey) -> HashMap<String, AttributeValue> {
    HashMap::from([
        ("PK".to_owned(), AttributeValue::S(key.pk.clone())),
        ("SK".to_owned(), AttributeValue::S(key.sk.clone())),
    ])
}

fn delete_request(key: &ItemKey) -> Result<WriteRequest, TableError> {
    let request = DeleteRequest::builder().set_key(Some(key_to_sdk(key))).build();
    let request = request.map_err(|error| {
        TableError::new(TableErrorKind::Rejected, format!("cannot build a request: {error}"))
    })?;
    Ok(WriteRequest::builder().delete_request(request).build())
}

fn not_empty(expression: String) -> Option<String> {
    (!expression.is_empty()).then_some(expression)
}

/// The cost of a write whose condition failed: the same as if it had been applied.
#[expect(clippy::cast_precision_loss, reason = "a few units")]
fn failed_write(size: usize) -> Consumed {
    Consumed { write: size.div_ceil(1_024).max(1) as f64, read: 0.0 }
}

fn written(capacity: Option<&ConsumedCapacity>) -> Consumed {
    let units = capacity.and_then(|capacity| capacity.capacity_units).unwrap_or_default();
    Consumed { write: units, read: 0.0 }
}

fn cancelled(error: &SdkError<TransactWriteItemsError>) -> Option<&[CancellationReason]> {
    match refusal(error)? {
        TransactWriteItemsError::TransactionCanceledException(cancelled) => {
            Some(cancelled.cancellation_reasons())
        }
        _ => None,
    }
}

impl Table for AwsTable {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        Box::pin(self.update_once(update))
    }

    fn update_bucket<'a>(
        &'a self,
        key: &'a BucketItemKey,
        update: Update,
    ) -> BoxFuture<'a, Result<Updated<Decoded>, TableError>> {
        Box::pin(async move { self.update_bucket_once(key, &update).await })
    }

    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        Box::pin(self.transact_once(changes))
    }

    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        Box::pin(self.read_all(keys, consistency))
    }

    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        Box::pin(self.query_once(query))
    }

    fn scan<'a>(
        &'a self,
        after: Option<&'a ItemKey>,
        limit: usize,
    ) -> BoxFuture<'a, Result<Scanned, TableError>> {
        Box::pin(self.scan_limited(after, Some(limit)))
    }

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        Box::pin(self.delete_all(keys))
    }

    fn time(&self) -> TableTime {
        self.dates.at(self.clock.now(), self.clock.stopwatch())
    }

    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.clock.sleep(wait)
    }
}
