/* Inner loops that numpy has no words for: pages opened, packs laid into the row of a batch, lengths placed into bins.

For the reader Python and numpy cost more, call by call, than decompressing does; and each length that is placed moves
a cursor of its own. Everything has a twin in Python, and is checked as the twin checks it: `shards/thrift.py`,
`shards/page_index.py`, `shards/page_values.py`, `stream/geometry.py`, `stream/collate.py`, `plan/decreasing.py`. Where
footers, pages and packs are not as expected the answer is None, never an error: whoever asked goes to the twin, which
reads them or says what is wrong with them. Work on tokens and lengths lets other threads run. Nothing keeps a state.

Built against the stable ABI: one library for every Python from 3.11.
*/

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Parquet is little-endian, and this code copies its values as they are; without it the Python twins are used"
#endif

/* Twice in the library, for processors with AVX2 and for all others; which one is used is decided when it is loaded. */
#if !defined(WIDE) && defined(__x86_64__) && defined(__gnu_linux__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define WIDE __attribute__((target_clones("avx2", "default"), flatten))
#endif
#endif
#ifndef WIDE
#define WIDE
#endif

#define IGNORED (-100) /* the label that PyTorch's cross entropy leaves out by default */

/* --- checksums -------------------------------------------------------------------------------------------------- */

static uint32_t crc_tables[8][256];

static void make_crc_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (sum & 1 ? 0xEDB88320u : 0);
        crc_tables[0][byte] = sum;
    }
    for (int table = 1; table < 8; table++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = crc_tables[table - 1][byte];
            crc_tables[table][byte] = before >> 8 ^ crc_tables[0][before & 0xFF];
        }
}

/* Goes on with a sum, not inverted, eight bytes at a time. */
static uint32_t crc_by_tables(uint32_t sum, const uint8_t *at, size_t size)
{
    while (size >= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        word ^= sum;
        sum = 0;
        for (int byte = 0; byte < 8; byte++)
            sum ^= crc_tables[7 - byte][word >> 8 * byte & 0xFF];
        at += 8, size -= 8;
    }
    while (size--)
        sum = sum >> 8 ^ crc_tables[0][(sum ^ *at++) & 0xFF];
    return sum;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* A block moved forward by the distance that the two constants stand for. */
#define FOLD(block, by) _mm_xor_si128(_mm_clmulepi64_si128(block, by, 0x00), _mm_clmulepi64_si128(block, by, 0x11))

/* Folds by multiplication without carry (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
Instruction", Intel 2009): 64 bytes at a time, then 16; the tables take what is left. Needs 64 bytes or more. */
__attribute__((target("pclmul,sse2"))) static uint32_t crc_by_folding(uint32_t sum, const uint8_t *at, size_t size)
{
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i *next = (const __m128i *)at;
    __m128i blocks[4];
    uint8_t rest[16];
    for (int i = 0; i < 4; i++)
        blocks[i] = _mm_loadu_si128(next++);
    blocks[0] = _mm_xor_si128(blocks[0], _mm_cvtsi32_si128((int)sum));
    for (size -= 64; size >= 64; size -= 64)
        for (int i = 0; i < 4; i++)
            blocks[i] = _mm_xor_si128(FOLD(blocks[i], by_64), _mm_loadu_si128(next++));
    __m128i all = blocks[0];
    for (int i = 1; i < 4; i++)
        all = _mm_xor_si128(FOLD(all, by_16), blocks[i]);
    for (; size >= 16; size -= 16)
        all = _mm_xor_si128(FOLD(all, by_16), _mm_loadu_si128(next++));
    _mm_storeu_si128((__m128i *)rest, all);
    return crc_by_tables(crc_by_tables(0, rest, 16), (const uint8_t *)next, size);
}
#endif

/* As `zlib.crc32`. */
static uint32_t crc32_of(const uint8_t *at, size_t size)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (size >= 64 && __builtin_cpu_supports("pclmul"))
        return ~crc_by_folding(~0u, at, size);
#endif
    return ~crc_by_tables(~0u, at, size);
}

/* --- pages ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const uint8_t *at, *end;
} Bytes;

static int32_t int32_at(const uint8_t *values, int64_t place)
{
    int32_t value;
    memcpy(&value, values + 4 * place, 4);
    return value;
}

/* The next variable-length integer. */
static int varint(Bytes *bytes, uint64_t *value)
{
    *value = 0;
    for (int shift = 0; shift < 63 && bytes->at < bytes->end; shift += 7) {
        uint8_t byte = *bytes->at++;
        *value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80)
            return 1;
    }
    return 0;
}

static int follows(Bytes *bytes, const char *expected, size_t size)
{
    if ((size_t)(bytes->end - bytes->at) < size || memcmp(bytes->at, expected, size))
        return 0;
    bytes->at += size;
    return 1;
}

/* The next field: its name, and an integer that is not negative. */
static int field(Bytes *bytes, const char *name, size_t size, int64_t *value)
{
    uint64_t raw;
    if (!follows(bytes, name, size) || !varint(bytes, &raw) || raw & 1)
        return 0;
    *value = (int64_t)(raw >> 1);
    return 1;
}

/* Whether a zstd frame says in its head that it holds `size` bytes (RFC 8878, 3.1.1.1), which zstd then holds it to. */
static int frame_says(Bytes frame, int64_t size)
{
    if (!follows(&frame, "\x28\xb5\x2f\xfd", 4) || frame.at == frame.end)
        return 0;
    uint8_t descriptor = *frame.at++;
    int is_single = descriptor & 0x20, length = descriptor >> 6;
    length = length ? 1 << length : is_single ? 1 : 0;
    uint64_t said = 0;
    if (descriptor & 3 || !length || frame.end - frame.at < !is_single + length)
        return 0;
    memcpy(&said, frame.at + !is_single, (size_t)length);
    return said + (length == 2 ? 256 : 0) == (uint64_t)size;
}

typedef struct {
    Bytes bytes; /* the page; its body, once it is opened */
    int64_t num_values, content_size;
} Page;

/* Reads the header of a page (version 1, PLAIN values, RLE levels, no statistics) and verifies its checksum. */
static int open_page(Page *page, int is_zstd)
{
    Bytes rest = page->bytes;
    int64_t body_size, num_values;
    uint64_t sum;
    if (!field(&rest, "\x15\x00\x15", 3, &page->content_size) || !field(&rest, "\x15", 1, &body_size)
        || !follows(&rest, "\x15", 1) || !varint(&rest, &sum) || sum >> 32 || !field(&rest, "\x1c\x15", 2, &num_values)
        || !follows(&rest, "\x15\x00\x15\x06\x15\x06\x00\x00", 8))
        return 0;
    uint32_t expected = (uint32_t)sum >> 1 ^ (sum & 1 ? ~0u : 0);
    if (body_size != rest.end - rest.at || num_values != page->num_values
        || page->content_size > 4 * num_values + 1024 || crc32_of(rest.at, (size_t)body_size) != expected)
        return 0;
    page->bytes = rest;
    return is_zstd ? frame_says(rest, page->content_size) : 1;
}

static int bytes_in(PyObject *object, Bytes *bytes)
{
    char *at;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &at, &size) < 0)
        return 0;
    bytes->at = (const uint8_t *)at;
    bytes->end = bytes->at + size;
    return 1;
}

static PyObject *open_pages(PyObject *self, PyObject *args)
{
    PyObject *pages, *num_values, *joined = NULL, *body_sizes = NULL, *sizes = NULL;
    int is_zstd;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!p", &PyList_Type, &pages, &PyList_Type, &num_values, &is_zstd))
        return NULL;
    Py_ssize_t count = PyList_Size(pages);
    if (PyList_Size(num_values) != count) {
        PyErr_SetString(PyExc_ValueError, "as many pages as numbers of values");
        return NULL;
    }
    Page *opened = PyMem_Malloc((size_t)count * sizeof(Page) + 1);
    if (!opened)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        opened[i].num_values = PyLong_AsLongLong(PyList_GetItem(num_values, i));
        if (PyErr_Occurred() || !bytes_in(PyList_GetItem(pages, i), &opened[i].bytes))
            goto done;
    }
    int is_well = 1;
    size_t total = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; is_well && i < count; i++) {
        is_well = open_page(&opened[i], is_zstd);
        total += (size_t)(opened[i].bytes.end - opened[i].bytes.at);
    }
    Py_END_ALLOW_THREADS
    if (!is_well) {
        PyMem_Free(opened);
        Py_RETURN_NONE;
    }
    joined = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
    body_sizes = PyList_New(count);
    sizes = PyList_New(count);
    if (!joined || !body_sizes || !sizes)
        goto done;
    char *at = PyBytes_AsString(joined);
    for (Py_ssize_t i = 0; i < count; i++) {
        size_t size = (size_t)(opened[i].bytes.end - opened[i].bytes.at);
        memcpy(at, opened[i].bytes.at, size);
        at += size;
        PyObject *number = PyLong_FromSize_t(size);
        if (!number || PyList_SetItem(body_sizes, i, number) < 0)
            goto done;
        number = PyLong_FromLongLong(opened[i].content_size);
        if (!number || PyList_SetItem(sizes, i, number) < 0)
            goto done;
    }
done:
    PyMem_Free(opened);
    if (PyErr_Occurred()) {
        Py_XDECREF(joined);
        Py_XDECREF(body_sizes);
        Py_XDECREF(sizes);
        return NULL;
    }
    return Py_BuildValue("NNN", joined, body_sizes, sizes);
}

static PyObject *read_ranges(PyObject *self, PyObject *args)
{
    PyObject *ranges, *found;
    int descriptor;
    (void)self;
    if (!PyArg_ParseTuple(args, "iO!", &descriptor, &PyList_Type, &ranges))
        return NULL;
    Py_ssize_t count = PyList_Size(ranges);
    found = PyList_New(count);
    struct {
        long long start, length;
        char *at;
        ssize_t read;
    } *wanted = PyMem_Calloc((size_t)count + 1, sizeof(*wanted));
    if (!found || !wanted) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *range = PyList_GetItem(ranges, i), *bytes;
        if (!PyTuple_Check(range) || !PyArg_ParseTuple(range, "LL", &wanted[i].start, &wanted[i].length))
            goto failed;
        if (wanted[i].length < 0) {
            PyErr_SetString(PyExc_ValueError, "a length below 0");
            goto failed;
        }
        bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)wanted[i].length);
        if (!bytes || PyList_SetItem(found, i, bytes) < 0)
            goto failed;
        wanted[i].at = PyBytes_AsString(bytes);
    }
    int error = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; !error && i < count; i++) {
        do
            wanted[i].read = pread(descriptor, wanted[i].at, (size_t)wanted[i].length, (off_t)wanted[i].start);
        while (wanted[i].read < 0 && errno == EINTR);
        error = wanted[i].read < 0 ? errno : 0;
    }
    Py_END_ALLOW_THREADS
    if (error) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        goto failed;
    }
    for (Py_ssize_t i = 0; i < count; i++) /* one that came short: the file ends, and what is there is given */
        if (wanted[i].read < wanted[i].length) {
            PyObject *part = PyBytes_FromStringAndSize(wanted[i].at, wanted[i].read);
            if (!part || PyList_SetItem(found, i, part) < 0)
                goto failed;
        }
    PyMem_Free(wanted);
    return found;
failed:
    PyMem_Free(wanted);
    Py_XDECREF(found);
    return NULL;
}

/* --- footers and page indexes ----------------------------------------------------------------------------------- */

/* Thrift's compact protocol. Kinds of values; numbers, bytes, lists and structs are all that Parquet's footers have. */
enum { TRUE = 1, FALSE, INT8, INT16, INT32, INT64, BINARY = 8, LIST, STRUCT = 12 };
#define DEEPEST 16

static int64_t zigzag(uint64_t value)
{
    return (int64_t)(value >> 1) ^ -(int64_t)(value & 1);
}

static PyObject *thrift_struct(Bytes *bytes, int depth, int levels);

/* The size of a list that is not longer than what is left of the bytes, and the kind of its items; 0: another form. */
static int list_head(Bytes *bytes, uint64_t *size, int *kind)
{
    if (bytes->at == bytes->end)
        return 0;
    *kind = *bytes->at & 0x0F;
    *size = *bytes->at++ >> 4;
    if (*size == 15 && !varint(bytes, size))
        return 0;
    return *size <= (uint64_t)(bytes->end - bytes->at);
}

/* The next value; NULL without an error set where it has another form. Structs are read `levels` deep, and left as
their bytes below that; below 0 everything is passed over and stands for itself as None. */
static PyObject *thrift_value(Bytes *bytes, int kind, int depth, int levels)
{
    const uint8_t *start;
    uint64_t value;
    switch (kind) {
    case TRUE:
    case FALSE:
        return PyBool_FromLong(kind == TRUE);
    case INT16:
    case INT32:
    case INT64:
        if (!varint(bytes, &value))
            return NULL;
        return levels < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(zigzag(value));
    case BINARY:
        if (!varint(bytes, &value) || value > (uint64_t)(bytes->end - bytes->at))
            return NULL;
        start = bytes->at;
        bytes->at += value;
        return levels < 0 ? Py_NewRef(Py_None) : PyBytes_FromStringAndSize((const char *)start, (Py_ssize_t)value);
    case LIST: {
        int item_kind;
        if (!depth || !list_head(bytes, &value, &item_kind))
            return NULL;
        PyObject *list = levels < 0 ? Py_NewRef(Py_None) : PyList_New((Py_ssize_t)value);
        for (uint64_t i = 0; list && i < value; i++) {
            PyObject *item;
            if (item_kind != TRUE && item_kind != FALSE)
                item = thrift_value(bytes, item_kind, depth - 1, levels);
            else /* a byte each, which may have run out */
                item = bytes->at == bytes->end ? NULL : PyBool_FromLong(*bytes->at++ == TRUE);
            if (levels < 0)
                Py_XDECREF(item);
            if (!item || (levels >= 0 && PyList_SetItem(list, (Py_ssize_t)i, item) < 0))
                Py_CLEAR(list);
        }
        return list;
    }
    case STRUCT: {
        if (!depth)
            return NULL;
        start = bytes->at;
        PyObject *fields = thrift_struct(bytes, depth - 1, levels - 1);
        if (!fields || levels != 0)
            return fields;
        Py_DECREF(fields);
        return PyBytes_FromStringAndSize((const char *)start, bytes->at - start);
    }
    }
    return NULL;
}

static PyObject *thrift_struct(Bytes *bytes, int depth, int levels)
{
    PyObject *found = levels < 0 ? Py_NewRef(Py_None) : PyDict_New();
    int64_t name = 0;
    while (found && bytes->at < bytes->end) {
        uint8_t head = *bytes->at++;
        uint64_t raw;
        if (!head)
            return found;
        if (head >> 4)
            name += head >> 4;
        else if (varint(bytes, &raw))
            name = zigzag(raw);
        else
            break;
        PyObject *value = thrift_value(bytes, head & 0x0F, depth, levels);
        int is_well = value != NULL;
        if (value && levels >= 0) {
            PyObject *key = PyLong_FromLongLong(name);
            is_well = key && PyDict_SetItem(found, key, value) == 0;
            Py_XDECREF(key);
        }
        Py_XDECREF(value);
        if (!is_well)
            break;
    }
    Py_XDECREF(found);
    return NULL;
}

static PyObject *read_struct(PyObject *self, PyObject *args)
{
    PyObject *object;
    Bytes bytes;
    int levels;
    (void)self;
    if (!PyArg_ParseTuple(args, "Si", &object, &levels) || !bytes_in(object, &bytes))
        return NULL;
    if (levels < 1) {
        PyErr_SetString(PyExc_ValueError, "levels from 1 on");
        return NULL;
    }
    PyObject *found = thrift_struct(&bytes, DEEPEST, levels - 1);
    if (found && bytes.at != bytes.end)
        Py_CLEAR(found);
    if (!found && !PyErr_Occurred())
        Py_RETURN_NONE;
    return found;
}

/* Enters the list that the next field is, of `count` items of a kind. */
static int enter_list(Bytes *index, const char *field, int kind, int64_t count)
{
    uint64_t said;
    int said_kind;
    return follows(index, field, 1) && list_head(index, &said, &said_kind) && said == (uint64_t)count
           && (said_kind == kind || (kind == FALSE && said_kind == TRUE));
}

/* Fills in offsets and sizes of the pages of an offset index, which follow each other from `start` to `stop`. */
static int locations(Bytes index, int64_t count, int64_t start, int64_t stop, int64_t per_page, int64_t *values)
{
    if (!enter_list(&index, "\x19", STRUCT, count))
        return 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t row, *offset = values + i, *size = values + count + i;
        if (!field(&index, "\x16", 1, offset) || !field(&index, "\x15", 1, size) || !field(&index, "\x16", 1, &row)
            || !follows(&index, "\x00", 1) || *offset != start || *size > stop - start || row != i * per_page)
            return 0;
        start += *size;
    }
    return start == stop && follows(&index, "\x00", 1) && index.at == index.end;
}

/* A list of integers. */
static PyObject *list_of(const int64_t *values, int64_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (int64_t i = 0; list && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(values[i]);
        if (!number || PyList_SetItem(list, (Py_ssize_t)i, number) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *page_locations(PyObject *self, PyObject *args)
{
    PyObject *object;
    Bytes index;
    long long count, start, stop, per_page;
    (void)self;
    if (!PyArg_ParseTuple(args, "SLLLL", &object, &count, &start, &stop, &per_page) || !bytes_in(object, &index))
        return NULL;
    if (count < 0 || count > index.end - index.at || start < 0 || stop < start || per_page < 1 || per_page > INT32_MAX)
        Py_RETURN_NONE; /* each page takes some bytes of the index */
    int64_t *values = PyMem_Malloc(16 * (size_t)count + 1);
    if (!values)
        return PyErr_NoMemory();
    PyObject *offsets = NULL, *sizes = NULL;
    int is_well = locations(index, count, start, stop, per_page, values);
    if (is_well) {
        offsets = list_of(values, count);
        sizes = list_of(values + count, count);
    }
    PyMem_Free(values);
    if (!is_well)
        Py_RETURN_NONE;
    if (!offsets || !sizes) {
        Py_XDECREF(offsets);
        Py_XDECREF(sizes);
        return NULL;
    }
    return Py_BuildValue("NN", offsets, sizes);
}

/* Fills in the smallest value of each page from a column index, where it is the largest too and no page is all null. */
static int minima(Bytes index, int64_t count, int64_t width, int64_t *values)
{
    if (!enter_list(&index, "\x19", FALSE, count) || index.end - index.at < count)
        return 0;
    for (int64_t i = 0; i < count; i++)
        if (*index.at++ & ~FALSE) /* 0 by some writers */
            return 0;
    for (int is_largest = 0; is_largest < 2; is_largest++) {
        if (!enter_list(&index, "\x19", BINARY, count) || index.end - index.at < count * (1 + width))
            return 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t value;
            if (*index.at++ != width)
                return 0;
            if (width == 8)
                memcpy(&value, index.at, 8);
            else
                value = int32_at(index.at, 0);
            index.at += width;
            if (!is_largest)
                values[i] = value;
            else if (values[i] != value)
                return 0;
        }
    }
    return 1;
}

static PyObject *page_minima(PyObject *self, PyObject *args)
{
    PyObject *object;
    Bytes index;
    long long count;
    int width;
    (void)self;
    if (!PyArg_ParseTuple(args, "SLi", &object, &count, &width) || !bytes_in(object, &index))
        return NULL;
    if (count < 0 || count > index.end - index.at || (width != 4 && width != 8))
        Py_RETURN_NONE;
    PyObject *found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * count));
    if (found && !minima(index, count, width, (int64_t *)PyBytes_AsString(found))) {
        Py_DECREF(found);
        Py_RETURN_NONE;
    }
    return found;
}

/* --- packs ------------------------------------------------------------------------------------------------------ */

/* Whether a block of levels, with its size in front, is `first` and then ones, `count` in all. */
static int levels_are(Bytes *content, int64_t count, int first)
{
    uint32_t size;
    if (content->end - content->at < 4)
        return 0;
    memcpy(&size, content->at, 4);
    content->at += 4;
    if ((uint64_t)(content->end - content->at) < size)
        return 0;
    Bytes block = {content->at, content->at + size};
    content->at = block.end;
    int64_t found = 0;
    while (found < count) {
        uint64_t head;
        if (!varint(&block, &head))
            return 0;
        uint64_t length = head >> 1;
        if (head & 1) { /* groups of eight, a bit each */
            if (length > (uint64_t)(block.end - block.at))
                return 0;
            for (; length; length--, found += 8) {
                int64_t left = count - found;
                unsigned within = left >= 8 ? 0xFF : left > 0 ? (1u << left) - 1 : 0;
                unsigned expected = found || first ? 0xFF : 0xFE;
                if ((*block.at++ ^ expected) & within)
                    return 0;
            }
        } else { /* a run */
            int value = found || first;
            if (!length || length > (uint64_t)(count - found) || block.at == block.end || *block.at++ != value
                || (!value && length > 1))
                return 0;
            found += (int64_t)length;
        }
    }
    return block.at == block.end;
}

/* Where the values of a page begin that holds one full list. */
static const uint8_t *values_in(Bytes content, int64_t count, int64_t size)
{
    if (!levels_are(&content, count, 0) || !levels_are(&content, count, 1) || content.end - content.at != size)
        return NULL;
    return content.at;
}

static int bit_at(const uint8_t *bits, int64_t place)
{
    return bits[place >> 3] >> (place & 7) & 1;
}

/* How many of the first `count` bits are set. */
static int64_t ones_in(const uint8_t *bits, int64_t count)
{
    int64_t found = 0, i = 0;
    for (; i + 64 <= count; i += 64) { /* halves, quarters and bytes of the word side by side; no instruction is needed */
        uint64_t word;
        memcpy(&word, bits + i / 8, 8);
        word -= word >> 1 & 0x5555555555555555u;
        word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
        word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
        found += (int64_t)(word * 0x0101010101010101u >> 56);
    }
    for (; i < count; i++)
        found += bit_at(bits, i);
    return found;
}

typedef struct {
    Bytes content[4]; /* of its pages: ids, mask, boundaries, and weights where there are any */
    const uint8_t *ids, *mask, *bounds, *weights;
    int64_t num_segments, num_tokens, num_targets, squares;
} Pack;

static int counts_are_sane(const Pack *pack, int64_t seq_len)
{
    return pack->num_segments >= 1 && pack->num_tokens >= pack->num_segments && pack->num_tokens <= seq_len;
}

/* Finds the values of a pack and holds them to its counts, as `check_packs` does. */
static int check_pack(Pack *pack, int64_t seq_len)
{
    int has_weights = pack->content[3].at != NULL;
    int64_t segments = pack->num_segments, tokens = pack->num_tokens;
    if (!counts_are_sane(pack, seq_len))
        return 0;
    int64_t num_bounds = segments + 1 + (tokens < seq_len), mask_size = (seq_len + 7) / 8;
    pack->ids = values_in(pack->content[0], seq_len, 4 * seq_len);
    pack->mask = values_in(pack->content[1], seq_len, mask_size);
    pack->bounds = values_in(pack->content[2], num_bounds, 4 * num_bounds);
    pack->weights = has_weights ? values_in(pack->content[3], seq_len, 4 * seq_len) : NULL;
    if (!pack->ids || !pack->mask || !pack->bounds || (has_weights && !pack->weights))
        return 0;
    if (int32_at(pack->bounds, 0) != 0 || int32_at(pack->bounds, num_bounds - 1) != seq_len
        || int32_at(pack->bounds, segments) != tokens)
        return 0;
    int64_t squares = 0, start = 0;
    for (int64_t i = 1; i < num_bounds; i++) {
        int64_t stop = int32_at(pack->bounds, i);
        if (stop <= start || stop > seq_len)
            return 0;
        if (i <= segments) {
            if (bit_at(pack->mask, start))
                return 0; /* a segment's first token has nothing that predicts it */
            squares += (stop - start) * (stop - start);
        }
        start = stop;
    }
    for (int64_t byte = tokens / 8; byte < mask_size; byte++) {
        unsigned within = 0xFF;
        if (8 * byte + 8 > seq_len) /* what fills the last byte is no token */
            within = (1u << (seq_len - 8 * byte)) - 1;
        unsigned bits = pack->mask[byte] & within;
        if (8 * byte >= tokens ? bits : bits >> (tokens - 8 * byte))
            return 0; /* the tail has loss */
    }
    return ones_in(pack->mask, tokens) == pack->num_targets && squares == pack->squares;
}

typedef struct {
    int32_t *ids, *positions, *labels, *segments;
    uint8_t *padding;
    float *weights; /* NULL: none */
    int64_t at;
    int32_t segment;
    int is_fractional;
} Row;

/* Labels of `count` tokens by their mask, of which `bits` are the first ones. */
static inline void label(int32_t *labels, const int32_t *ids, uint64_t bits, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        labels[i] = bits >> i & 1 ? ids[i] : IGNORED;
}

/* The same for a whole word of 64; most are all targets or none. */
static inline void label_word(int32_t *labels, const int32_t *ids, uint64_t bits)
{
    if (bits == ~(uint64_t)0)
        memcpy(labels, ids, 256);
    else if (!bits)
        for (int i = 0; i < 64; i++)
            labels[i] = IGNORED;
    else
        label(labels, ids, bits, 64);
}

/* Lays `count` tokens of a pack, from `start`, into the row. Without loss where `has_loss` is 0. */
static void lay(Row *row, const Pack *pack, int64_t start, int64_t count, int has_loss)
{
    int32_t *ids = row->ids + row->at, *labels = row->labels + row->at;
    memcpy(ids, pack->ids + 4 * start, 4 * (size_t)count);
    memset(row->padding + row->at, 0, (size_t)count);
    int64_t i = 0;
    while (i < count) {
        int64_t at = start + i, width = count - i;
        uint64_t bits = 0;
        if (has_loss && at % 8 == 0 && width >= 64) {
            memcpy(&bits, pack->mask + at / 8, 8);
            label_word(labels + i, ids + i, bits);
            i += 64;
            continue;
        }
        if (has_loss) { /* up to the next whole byte, or the last tokens */
            bits = pack->mask[at / 8] >> at % 8;
            width = width < 8 - at % 8 ? width : 8 - at % 8;
        } else
            width = width < 64 ? width : 64;
        label(labels + i, ids + i, bits, width);
        i += width;
    }
    if (row->weights) {
        float *weights = row->weights + row->at;
        for (i = 0; i < count; i++) {
            weights[i] = has_loss && bit_at(pack->mask, start + i);
            if (weights[i] && pack->weights) { /* one without weights has loss in full */
                memcpy(weights + i, pack->weights + 4 * (start + i), 4);
                row->is_fractional |= weights[i] != 1;
            }
        }
    }
    row->at += count;
}

static void pad(Row *row, int64_t count, int32_t pad_id)
{
    for (int64_t i = row->at; i < row->at + count; i++) {
        row->ids[i] = pad_id;
        row->labels[i] = IGNORED;
        if (row->weights)
            row->weights[i] = 0;
    }
    memset(row->padding + row->at, 1, (size_t)count);
    row->at += count;
}

/* Numbers the tokens of one segment of the row. */
static void number(Row *row, int64_t start, int64_t size)
{
    int32_t *positions = row->positions + start, *segments = row->segments + start, segment = row->segment++;
    for (int64_t i = 0; i < size; i++)
        positions[i] = (int32_t)i;
    for (int64_t i = 0; i < size; i++)
        segments[i] = segment;
}

typedef struct {
    int64_t seq_len, align, num_repeated;
    int32_t pad_id;
    int is_padded;
} Shape;

static int64_t aligned(int64_t size, int64_t align)
{
    return (size + align - 1) / align * align;
}

/* The tail that a pack gets in the row, behind `used` tokens. */
static int64_t tail_of(const Shape *shape, int64_t used)
{
    return shape->is_padded && used < shape->seq_len ? shape->seq_len - used : 0;
}

/* Tokens and segments of the row, padding with them. */
static void measure(const Pack *packs, Py_ssize_t count, const Shape *shape, int64_t *tokens, int64_t *segments)
{
    *tokens = *segments = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t used = packs[i].num_tokens;
        if (shape->align > 1) {
            used = 0;
            for (int64_t k = 0; k < packs[i].num_segments; k++)
                used += aligned(int32_at(packs[i].bounds, k + 1) - int32_at(packs[i].bounds, k), shape->align);
        }
        int64_t tail = tail_of(shape, used);
        *tokens += used + tail;
        *segments += packs[i].num_segments + (tail > 0);
    }
}

/* Fills the row, its boundaries, and the offsets of real tokens; returns its longest segment. */
WIDE static int64_t fill(Row *row, const Pack *packs, Py_ssize_t count, const Shape *shape, int32_t *cu, int32_t *logical)
{
    int64_t longest = 0, end = 0;
    *cu = *logical = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Pack *pack = &packs[i];
        int has_loss = i < count - shape->num_repeated;
        int64_t first = end;
        if (shape->align == 1)
            lay(row, pack, 0, pack->num_tokens, has_loss);
        for (int64_t k = 0; k < pack->num_segments; k++) {
            int64_t start = int32_at(pack->bounds, k), size = int32_at(pack->bounds, k + 1) - start;
            int64_t physical = aligned(size, shape->align);
            if (shape->align > 1) {
                lay(row, pack, start, size, has_loss);
                pad(row, physical - size, shape->pad_id);
            }
            number(row, end, physical);
            end += physical;
            longest = physical > longest ? physical : longest;
            cu[1] = (int32_t)end, cu++;
            logical[1] = logical[0] + (int32_t)size, logical++;
        }
        int64_t tail = tail_of(shape, end - first);
        if (tail) { /* a segment of its own without a real token, which for offsets counts as long as it is */
            pad(row, tail, shape->pad_id);
            number(row, end, tail);
            end += tail;
            longest = tail > longest ? tail : longest;
            cu[1] = (int32_t)end, cu++;
            logical[1] = logical[0] + (int32_t)tail, logical++;
        }
    }
    return longest;
}

/* A new array of bytes, its address in `at`. */
static PyObject *new_bytes(int64_t size, void *at)
{
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)size);
    *(char **)at = bytes ? PyByteArray_AsString(bytes) : NULL;
    return bytes;
}

/* Reads a pack from its tuple: content of all its pages, and where each begins and the last ends. */
static int pack_in(PyObject *tuple, Pack *pack)
{
    Bytes content;
    Py_ssize_t num_pages = PyTuple_Check(tuple) ? PyTuple_Size(tuple) - 2 : 0;
    if (num_pages != 3 && num_pages != 4) {
        PyErr_SetString(PyExc_ValueError, "a pack is its content, and where its pages begin and the last ends");
        return 0;
    }
    if (!bytes_in(PyTuple_GetItem(tuple, 0), &content))
        return 0;
    long long start = PyLong_AsLongLong(PyTuple_GetItem(tuple, 1));
    for (Py_ssize_t page = 0; page < num_pages; page++) {
        long long stop = PyLong_AsLongLong(PyTuple_GetItem(tuple, page + 2));
        if (PyErr_Occurred())
            return 0;
        if (start < 0 || stop < start || stop > content.end - content.at) {
            PyErr_SetString(PyExc_ValueError, "a page lies outside of the content");
            return 0;
        }
        pack->content[page] = (Bytes){content.at + start, content.at + stop};
        start = stop;
    }
    return 1;
}

static PyObject *lay_row(PyObject *self, PyObject *args)
{
    PyObject *list, *counts_object;
    Shape shape;
    long long seq_len, align, num_repeated;
    int has_weights = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!OLLipL", &PyList_Type, &list, &counts_object, &seq_len, &align, &shape.pad_id,
                          &shape.is_padded, &num_repeated))
        return NULL;
    Py_ssize_t count = PyList_Size(list);
    shape.seq_len = seq_len, shape.align = align, shape.num_repeated = num_repeated;
    if (count < 1 || seq_len < 1 || align < 1 || seq_len > INT32_MAX || align > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "at least one pack; seq_len and align from 1 on");
        return NULL;
    }
    Py_buffer counts;
    if (PyObject_GetBuffer(counts_object, &counts, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    PyObject *result = NULL, *arrays[8] = {0};
    Pack *packs = PyMem_Calloc((size_t)count, sizeof(Pack));
    if (!packs) {
        PyErr_NoMemory();
        goto done;
    }
    if (counts.len != count * 4 * (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "counts are (packs, 4) int64");
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!pack_in(PyList_GetItem(list, i), &packs[i]))
            goto done;
        has_weights |= packs[i].content[3].at != NULL;
        const int64_t *numbers = (const int64_t *)counts.buf + 4 * i;
        packs[i].num_segments = numbers[0], packs[i].num_tokens = numbers[1];
        packs[i].num_targets = numbers[2], packs[i].squares = numbers[3];
    }

    int is_well = 1;
    int64_t num_tokens = 0, num_segments = 0, num_targets = 0, total = 0, rows = 0;
    for (Py_ssize_t i = 0; is_well && i < count; i++) {
        /* The boundaries tell how much room aligned segments take; otherwise the counts do, and one pass is enough. */
        is_well = align > 1 ? check_pack(&packs[i], seq_len) : counts_are_sane(&packs[i], seq_len);
        num_tokens += packs[i].num_tokens;
        num_segments += packs[i].num_segments;
        num_targets += i < count - num_repeated ? packs[i].num_targets : 0;
    }
    if (is_well)
        measure(packs, count, &shape, &total, &rows);
    if (!is_well || total > INT32_MAX) {
        result = Py_NewRef(Py_None);
        goto done;
    }

    Row row = {0};
    int32_t *cu, *logical;
    arrays[0] = new_bytes(4 * total, &row.ids);
    arrays[1] = new_bytes(4 * total, &row.positions);
    arrays[2] = new_bytes(4 * total, &row.labels);
    arrays[3] = new_bytes(4 * total, &row.segments);
    arrays[4] = new_bytes(total, &row.padding);
    arrays[5] = new_bytes(4 * (rows + 1), &cu);
    arrays[6] = new_bytes(4 * (rows + 1), &logical);
    arrays[7] = has_weights ? new_bytes(4 * total, &row.weights) : Py_NewRef(Py_None);
    for (int i = 0; i < 8; i++)
        if (!arrays[i])
            goto done;
    int64_t longest = 0;
    int is_same = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; align == 1 && is_well && i < count; i++)
        is_well = check_pack(&packs[i], seq_len);
    if (is_well) {
        longest = fill(&row, packs, count, &shape, cu, logical);
        is_same = !memcmp(cu, logical, 4 * (size_t)(rows + 1));
    }
    Py_END_ALLOW_THREADS
    if (!is_well) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    result = Py_BuildValue("OOOOOOOOLLLLi", arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], arrays[5],
                           is_same ? Py_None : arrays[6], arrays[7], (long long)longest, (long long)num_targets,
                           (long long)num_segments, (long long)num_tokens, row.is_fractional);
done:
    for (int i = 0; i < 8; i++)
        Py_XDECREF(arrays[i]);
    PyMem_Free(packs);
    PyBuffer_Release(&counts);
    return result;
}

/* --- lengths ---------------------------------------------------------------------------------------------------- */

/* A contiguous array of 4 or 8 byte integers; the caller sees to it that they are integers. */
static int integers_in(PyObject *object, Py_buffer *buffer, int flags)
{
    if (PyObject_GetBuffer(object, buffer, PyBUF_C_CONTIGUOUS | flags) < 0)
        return 0;
    if (buffer->itemsize == 4 || buffer->itemsize == 8)
        return 1;
    PyErr_SetString(PyExc_ValueError, "integers of 4 or 8 bytes");
    PyBuffer_Release(buffer);
    return 0;
}

#define LENGTH(buffer, i) ((buffer).itemsize == 4 ? ((const int32_t *)(buffer).buf)[i] : ((const int64_t *)(buffer).buf)[i])

static PyObject *count_lengths(PyObject *self, PyObject *args)
{
    PyObject *lengths_object, *table_object;
    Py_buffer lengths, table;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO", &lengths_object, &table_object) || !integers_in(lengths_object, &lengths, 0))
        return NULL;
    if (!integers_in(table_object, &table, PyBUF_WRITABLE)) {
        PyBuffer_Release(&lengths);
        return NULL;
    }
    int64_t count = lengths.len / lengths.itemsize, size = table.len / 8, *counts = table.buf;
    int is_well = table.itemsize == 8;
    if (is_well) {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t i = 0; is_well && i < count; i++) {
            int64_t length = LENGTH(lengths, i);
            is_well = length >= 0 && length < size;
            if (is_well)
                counts[length]++;
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&table);
    if (is_well)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "a table of int64 with a place for every length");
    return NULL;
}

/* Where the next segment of a length goes. */
typedef struct {
    int32_t bin, left, per_bin; /* so many more into this bin, and into each after it */
    int32_t bins; /* of the line, this one with them */
    int32_t line; /* the one after it */
} Cursor;

/* Goes on to the next line of a length; 0 where the plan has no more. */
static int next_line(Cursor *cursor, int64_t length, const int64_t *lines, int64_t num_lines)
{
    const int64_t *line = lines + 4 * (int64_t)cursor->line;
    if (cursor->line >= num_lines || line[0] != length)
        return 0;
    cursor->bin = (int32_t)line[1], cursor->bins = (int32_t)line[2];
    cursor->left = cursor->per_bin = (int32_t)line[3];
    cursor->line++;
    return 1;
}

/* The bin for the next segment of a length. No branch for what comes without a pattern: when a bin is full. */
static int32_t next_bin(Cursor *cursor)
{
    int32_t bin = cursor->bin, is_full = cursor->left == 1;
    cursor->left += is_full * cursor->per_bin - 1;
    cursor->bin += is_full;
    cursor->bins -= is_full;
    return bin;
}

static PyObject *place_lengths(PyObject *self, PyObject *args)
{
    PyObject *objects[4];
    Py_buffer buffers[4];
    int held = 0, is_well = 1;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOO", &objects[0], &objects[1], &objects[2], &objects[3]))
        return NULL;
    while (held < 4 && integers_in(objects[held], &buffers[held], held == 3 ? PyBUF_WRITABLE : 0))
        held++;
    Cursor *cursors = NULL;
    if (held < 4)
        goto done;
    Py_buffer lengths = buffers[0];
    const int64_t *lines = buffers[1].buf, *first_line = buffers[2].buf;
    int64_t *bins = buffers[3].buf;
    int64_t count = lengths.len / lengths.itemsize, num_lines = buffers[1].len / 32, size = buffers[2].len / 8;
    is_well = buffers[1].itemsize == 8 && buffers[2].itemsize == 8 && buffers[3].itemsize == 8
              && buffers[3].len == 8 * count && num_lines < INT32_MAX;
    for (int64_t i = 0; is_well && i < num_lines; i++) /* what an int32 holds, and nothing empty */
        for (int k = 1; k < 4; k++)
            is_well = is_well && lines[4 * i + k] >= (k > 1) && lines[4 * i + k] < INT32_MAX;
    cursors = is_well ? PyMem_Calloc((size_t)size + 1, sizeof(Cursor)) : NULL;
    if (is_well && !cursors) {
        PyErr_NoMemory();
        goto done;
    }
    if (is_well) {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t i = 0; is_well && i < size; i++) {
            is_well = first_line[i] >= 0 && first_line[i] <= num_lines;
            cursors[i].line = (int32_t)first_line[i];
        }
        for (int64_t i = 0; is_well && i < count; i++) {
            int64_t length = LENGTH(lengths, i);
            is_well = length >= 0 && length < size
                      && (cursors[length].bins || next_line(&cursors[length], length, lines, num_lines));
            if (is_well)
                bins[i] = next_bin(&cursors[length]);
        }
        Py_END_ALLOW_THREADS
    }
    if (!is_well)
        PyErr_SetString(PyExc_ValueError, "a plan of these lengths, in int64, with numbers below 2^31");
done:
    PyMem_Free(cursors);
    while (held)
        PyBuffer_Release(&buffers[--held]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *crc32(PyObject *self, PyObject *object)
{
    Bytes bytes;
    (void)self;
    if (!bytes_in(object, &bytes))
        return NULL;
    return PyLong_FromUnsignedLong(crc32_of(bytes.at, (size_t)(bytes.end - bytes.at)));
}

static PyMethodDef methods[] = {
    {"crc32", crc32, METH_O, "crc32(data)\n\nAs zlib.crc32."},
    {"read_ranges", read_ranges, METH_VARARGS, "read_ranges(descriptor, ranges)\n\nSee _native.pyi."},
    {"read_struct", read_struct, METH_VARARGS, "read_struct(data, levels)\n\nSee _native.pyi."},
    {"page_locations", page_locations, METH_VARARGS,
     "page_locations(index, num_pages, start, stop, packs_per_page)\n\nSee _native.pyi."},
    {"page_minima", page_minima, METH_VARARGS, "page_minima(index, num_pages, width)\n\nSee _native.pyi."},
    {"open_pages", open_pages, METH_VARARGS, "open_pages(pages, num_values, is_zstd)\n\nSee _native.pyi."},
    {"lay_row", lay_row, METH_VARARGS,
     "lay_row(packs, counts, seq_len, align, pad_id, padded, num_repeated)\n\nSee _native.pyi."},
    {"count_lengths", count_lengths, METH_VARARGS, "count_lengths(lengths, counts)\n\nSee _native.pyi."},
    {"place_lengths", place_lengths, METH_VARARGS,
     "place_lengths(lengths, lines, first_line, bins)\n\nSee _native.pyi."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "packsvc._native", "Compiled inner loops.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    make_crc_tables();
    return PyModuleDef_Init(&module);
}
