//! Creating the table, for development and tests. In an AWS account the stack creates it.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::error::BuildError;
use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, GlobalSecondaryIndex, KeySchemaElement, KeyType, Projection,
    ProjectionType, ScalarAttributeType, StreamSpecification, StreamViewType, TableStatus,
    TimeToLiveSpecification,
};
use zae_limiter_core::Clock;
use zae_limiter_schema::records::Version;
use zae_limiter_schema::{Index, Table as _, TableError, TableErrorKind};

use super::AwsTable;
use super::errors::table_error;
use super::retries::{CallSettings, table_change_settings};

/// How often the status of the new table is checked, and the wait in between: 30 s in all.
const CHECKS_MAX: u32 = 300;
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// What the index by resource projects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResourceIndex {
    /// Keys only: an acquire does not write the index.
    #[default]
    KeysOnly,
    /// All attributes, as readers of the Python client expect. Every write costs twice as much.
    All,
}

/// A table to be created.
#[derive(Clone, Debug)]
pub struct CreateTable {
    name: String,
    stream: bool,
    resource_index: ResourceIndex,
}

impl CreateTable {
    /// A table of this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), stream: false, resource_index: ResourceIndex::default() }
    }

    /// With a change stream.
    #[must_use]
    pub fn with_stream(mut self) -> Self {
        self.stream = true;
        self
    }

    /// Sets the projection of the index by resource.
    #[must_use]
    pub fn resource_index(mut self, kind: ResourceIndex) -> Self {
        self.resource_index = kind;
        self
    }

    /// Creates the table and waits until it is active. A table that exists stays as it is.
    ///
    /// # Errors
    ///
    /// [`TableError`] when a call fails, or the table is not active after 30 s.
    pub async fn create(self, client: &Client, clock: &Arc<dyn Clock>) -> Result<(), TableError> {
        let rejected = |error: BuildError| {
            let message = format!("cannot build a request: {error}");
            TableError::new(TableErrorKind::Rejected, message)
        };
        let mut request = client
            .create_table()
            .table_name(&self.name)
            .billing_mode(BillingMode::PayPerRequest)
            .set_key_schema(Some(key_schema("PK", "SK").map_err(rejected)?));
        for name in ["PK", "SK"].into_iter().chain(Index::ALL.iter().flat_map(|i| [i.pk(), i.sk()]))
        {
            let definition = AttributeDefinition::builder()
                .attribute_name(name)
                .attribute_type(ScalarAttributeType::S)
                .build();
            request = request.attribute_definitions(definition.map_err(rejected)?);
        }
        for index in Index::ALL {
            request = request.global_secondary_indexes(self.index(index).map_err(rejected)?);
        }
        if self.stream {
            let stream = StreamSpecification::builder()
                .stream_enabled(true)
                .stream_view_type(StreamViewType::NewAndOldImages)
                .build();
            request = request.stream_specification(stream.map_err(rejected)?);
        }
        match request.customize().config_override(table_change_settings()).send().await {
            Ok(_) => {}
            Err(error)
                if error.as_service_error().is_some_and(|e| e.is_resource_in_use_exception()) =>
            {
                return Ok(());
            }
            Err(error) => return Err(table_error(&self.name, error)),
        }
        self.wait(client, clock).await?;
        let expiry = TimeToLiveSpecification::builder().enabled(true).attribute_name("ttl").build();
        let expiry = client
            .update_time_to_live()
            .table_name(&self.name)
            .time_to_live_specification(expiry.map_err(rejected)?);
        let expiry = expiry.customize().config_override(table_change_settings()).send().await;
        expiry.map_err(|error| table_error(&self.name, error))?;
        self.write_version(client, clock).await
    }

    async fn write_version(
        &self,
        client: &Client,
        clock: &Arc<dyn Clock>,
    ) -> Result<(), TableError> {
        let version = Version {
            schema: Version::SCHEMA.to_owned(),
            aggregator: None,
            client_min: "0.0.0".to_owned(),
            updated_at: Some(clock.now()),
            updated_by: Some(concat!("zae-limiter ", env!("CARGO_PKG_VERSION")).to_owned()),
        };
        let table = AwsTable::new(client.clone(), &self.name, Arc::clone(clock));
        table.update(&version.update()).await.map(|_| ())
    }

    fn index(&self, index: Index) -> Result<GlobalSecondaryIndex, BuildError> {
        let everything = match index {
            Index::Parent => true,
            Index::Resource => self.resource_index == ResourceIndex::All,
            Index::Entity | Index::Namespace => false,
        };
        let kind = if everything { ProjectionType::All } else { ProjectionType::KeysOnly };
        GlobalSecondaryIndex::builder()
            .index_name(index.name())
            .set_key_schema(Some(key_schema(index.pk(), index.sk())?))
            .projection(Projection::builder().projection_type(kind).build())
            .build()
    }

    async fn wait(&self, client: &Client, clock: &Arc<dyn Clock>) -> Result<(), TableError> {
        for _ in 0..CHECKS_MAX {
            let description = client
                .describe_table()
                .table_name(&self.name)
                .customize()
                .config_override(CallSettings::for_client(client).with_retries())
                .send()
                .await;
            let description = description.map_err(|error| table_error(&self.name, error))?;
            let status = description.table.and_then(|table| table.table_status);
            if status == Some(TableStatus::Active) {
                return Ok(());
            }
            clock.sleep(CHECK_INTERVAL).await;
        }
        let message = format!("table {} is still being created; try again later", self.name);
        Err(TableError::new(TableErrorKind::Unavailable, message))
    }
}

fn key_schema(pk: &str, sk: &str) -> Result<Vec<KeySchemaElement>, BuildError> {
    [(pk, KeyType::Hash), (sk, KeyType::Range)]
        .into_iter()
        .map(|(name, kind)| KeySchemaElement::builder().attribute_name(name).key_type(kind).build())
        .collect()
}
