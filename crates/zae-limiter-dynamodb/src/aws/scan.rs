//! Reading the whole table, for migrations and for sweeping.

use aws_sdk_dynamodb::types::{AttributeValue, ReturnConsumedCapacity};
use zae_limiter_schema::{Consumed, Item, ItemKey, Scanned, TableError};

use super::convert::from_sdk;
use super::errors::table_error;
use super::{AwsTable, key_to_sdk};

impl AwsTable {
    /// Reads a page of items after a key, or the first page, and returns the key for the next one.
    ///
    /// # Errors
    ///
    /// [`TableError`] when the call fails.
    pub async fn scan_page(
        &self,
        after: Option<&ItemKey>,
    ) -> Result<(Vec<Item>, Option<ItemKey>), TableError> {
        let scanned = self.scan_limited(after, None).await?;
        Ok((scanned.items, scanned.next))
    }

    pub(super) async fn scan_limited(
        &self,
        after: Option<&ItemKey>,
        limit: Option<usize>,
    ) -> Result<Scanned, TableError> {
        let sent = self
            .client
            .scan()
            .table_name(&self.name)
            .consistent_read(true)
            .return_consumed_capacity(ReturnConsumedCapacity::Total)
            .set_limit(limit.map(|limit| i32::try_from(limit).unwrap_or(i32::MAX)))
            .set_exclusive_start_key(after.map(key_to_sdk))
            .customize()
            .config_override(self.settings.with_retries())
            .send()
            .await
            .map_err(|error| table_error(&self.name, error))?;
        let next = sent.last_evaluated_key.and_then(|key| {
            let text = |name: &str| match key.get(name) {
                Some(AttributeValue::S(text)) => Some(text.clone()),
                _ => None,
            };
            Some(ItemKey::new(text("PK")?, text("SK")?))
        });
        let items = sent.items.unwrap_or_default().into_iter().map(from_sdk).collect();
        let read = sent.consumed_capacity.and_then(|all| all.capacity_units).unwrap_or_default();
        Ok(Scanned { items, next, consumed: Consumed { read, write: 0.0 } })
    }
}
