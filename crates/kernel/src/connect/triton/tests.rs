//! Functions of a server whose answers the test provides. Decoding its bytes is tested with the client.

mod tensors;
mod text;

use std::sync::Mutex;

use sapwood_net::triton::ServerAddress;
use sapwood_proto::code::Code;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::*;
use crate::kernel::Kernel;

/// A server: its models, and its answers to their requests.
struct Server {
    kernel: Kernel,
    /// Bodies of generate requests.
    asked: Arc<Mutex<Vec<Value>>>,
    /// Resolves when a client has disconnected from a waiting answer.
    left: Arc<tokio::sync::Notify>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The answers of a server.
#[derive(Clone)]
struct World {
    /// Metadata and configuration of each model.
    models: Vec<(Value, Value)>,
    /// The status of the head, and the events; `...` at the end waits for the client to disconnect.
    answer: (u16, String),
}

impl Server {
    /// Serves these answers and imports the models into a kernel of its own.
    async fn start(world: World) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address =
            ServerAddress::new(format!("triton+http://{}", listener.local_addr().unwrap()));
        let (asked, left) = (Arc::default(), Arc::default());
        let server = (Arc::new(world), Arc::clone(&asked), Arc::clone(&left));
        let task = tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let (world, asked, left) = server.clone();
                tokio::spawn(async move {
                    serve(tcp, &world, &asked, &left).await;
                });
            }
        });
        let client = TritonClient::connect(&address).await.unwrap();
        let kernel = Kernel::new();
        kernel.add_all(import(&client).await.unwrap()).unwrap();
        Self {
            kernel,
            asked,
            left,
            task,
        }
    }

    /// The only request so far.
    fn request(&self) -> Value {
        let asked = self.asked.lock().unwrap();
        assert_eq!(asked.len(), 1, "{asked:?}");
        asked[0].clone()
    }

    fn requests(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

async fn serve(
    mut tcp: TcpStream,
    world: &World,
    asked: &Mutex<Vec<Value>>,
    left: &tokio::sync::Notify,
) {
    let mut request = Vec::new();
    let (path, body) = loop {
        if tcp.read_buf(&mut request).await.unwrap_or(0) == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&request);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
            break (head.split(' ').nth(1).unwrap().to_owned(), body.to_owned());
        }
    };
    let json = |value: &Value| (200, "application/json", value.to_string());
    let parts: Vec<&str> = path.trim_start_matches("/v2/").split('/').collect();
    let model = |name: &str| {
        world
            .models
            .iter()
            .find(|(metadata, _)| metadata["name"] == name)
    };
    let (status, mime, text) = match &parts[..] {
        ["health", "ready"] => (200, "text/plain", String::new()),
        ["repository", "index"] => {
            let models = world.models.iter();
            json(
                &models
                    .map(|(it, _)| json!({"name": it["name"], "version": "1", "state": "READY"}))
                    .collect(),
            )
        }
        ["models", name] => json(&model(name).unwrap().0),
        ["models", name, "config"] => json(&model(name).unwrap().1),
        ["models", _, "generate_stream"] => {
            asked
                .lock()
                .unwrap()
                .push(serde_json::from_str(&body).unwrap());
            (world.answer.0, "text/event-stream", world.answer.1.clone())
        }
        other => panic!("{other:?}"),
    };
    let waits = text.ends_with("...");
    let text = text.trim_end_matches("...");
    let length = text.len() + usize::from(waits);
    let head =
        format!("HTTP/1.1 {status} X\r\ncontent-type: {mime}\r\ncontent-length: {length}\r\n\r\n");
    tcp.write_all(head.as_bytes()).await.unwrap();
    tcp.write_all(text.as_bytes()).await.unwrap();
    if waits {
        let mut more = [0];
        assert!(matches!(tcp.read(&mut more).await, Ok(0) | Err(_)));
        left.notify_one();
    }
}

fn tensor(name: &str, datatype: &str, shape: &[i64]) -> Value {
    json!({"name": name, "datatype": datatype, "shape": shape})
}

fn events(list: &[Value]) -> (u16, String) {
    (
        200,
        list.iter()
            .map(|event| format!("data: {event}\n\n"))
            .collect(),
    )
}

/// A model with an unknown datatype is left out; the others are imported.
#[tokio::test]
async fn tr_1308_models_that_cannot_be_read_are_left_out() {
    let odd = json!({"name": "odd", "inputs": [tensor("x", "QUAD", &[1])], "outputs": []});
    let world = World {
        models: vec![(odd, json!({})), text::bare(), tensors::sums()],
        answer: events(&[]),
    };
    let server = Server::start(world).await;
    let specs = server.kernel.specs();
    let mut names: Vec<_> = specs
        .iter()
        .map(|spec| (spec.name.to_string(), spec.model))
        .collect();
    names.sort();
    assert_eq!(
        names,
        [("bare".to_owned(), true), ("sums._2_x".to_owned(), false)]
    );
}
