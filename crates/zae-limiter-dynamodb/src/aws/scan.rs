//! Reading the whole table, for migrations.

use aws_sdk_dynamodb::types::AttributeValue;
use zae_limiter_schema::{Item, ItemKey, TableError};

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
        let sent = self
            .client
            .scan()
            .table_name(&self.name)
            .consistent_read(true)
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
        Ok((sent.items.unwrap_or_default().into_iter().map(from_sdk).collect(), next))
    }
}
